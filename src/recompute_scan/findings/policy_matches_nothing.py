"""RS501: a policy of a selective checkpoint was asked, and kept nothing."""

from __future__ import annotations

from recompute_scan.deciding import WatchedPolicy
from recompute_scan.findings.base import Answer, Rule
from recompute_scan.findings.evidence import Evidence
from recompute_scan.findings.policy_facts import (
    POLICY_DOCS,
    describe_decided,
    overloads_met,
    spell_overloads,
)
from recompute_scan.result import Finding, Fix
from recompute_scan.units import plural


def check(evidence: Evidence) -> Answer:
    """One finding for each policy that kept nothing of what it named."""
    return [
        _finding(evidence, policy)
        for policy in evidence.decided
        if policy.met and not policy.kept and not policy.raised
    ]


def _finding(evidence: Evidence, policy: WatchedPolicy) -> Finding:
    missed = [one for one in policy.entries if one.kind == "packet" and one.met and not one.kept]
    called = [
        f"it names {entry.name}; called were: "
        + ", ".join(f"{met.name} ({met.met} times)" for met in overloads_met(policy, entry))
        for entry in missed
    ]
    unmet = [one.name for one in policy.entries if not one.met]
    if unmet:
        called.append(f"it names, and none was called: {', '.join(unmet[:8])}")
    why = (
        "Its operators are named without an overload, which no call is equal to."
        if missed
        else "None of the operators that it names is called here."
        if unmet
        else "It said so itself."
    )
    return RULE.finding(
        evidence,
        confidence="high",
        title=f"The policy {policy.name} keeps nothing: its checkpoint recomputes everything",
        detail=(
            f"It was asked {plural(policy.met, 'time')} in one step, and no result was kept. {why} "
            "A checkpoint without a policy does the same, without asking at each operator."
        ),
        evidence=(*describe_decided(policy), *called),
        fix=Fix(
            summary="Name the overload that is called, such as torch.ops.aten.mm.default."
            if missed
            else "Name operators that are called, or leave the policy out (context_fn).",
            disposition="review",
            diff=spell_overloads(evidence, policy, missed) if missed else None,
            keep="the checkpoint",
            remove="" if missed else "context_fn, if everything is to be recomputed",
            docs=POLICY_DOCS,
            reason="What is kept takes memory: see that it fits.",
        ),
    )


RULE = Rule("RS501", "policy-matches-nothing", check, severity="warning", needs="policies")
