"""RS502: a policy names an operator that it never meets, beside others that it keeps."""

from __future__ import annotations

from recompute_scan.deciding import PolicyEntry, WatchedPolicy
from recompute_scan.findings.base import Answer, Rule
from recompute_scan.findings.evidence import Evidence
from recompute_scan.findings.policy_facts import (
    POLICY_DOCS,
    describe_decided,
    may_keep,
    overloads_met,
    spell_overloads,
)
from recompute_scan.recompute import vocabulary as words
from recompute_scan.result import Finding, Fix
from recompute_scan.units import plural


def check(evidence: Evidence) -> Answer:
    """One finding for each policy of the user's own that has such entries."""
    found = []
    for policy in evidence.decided:
        missed = _missed(policy)
        if policy.own and policy.kept and missed:
            found.append(_finding(evidence, policy, missed))
    return found


def _missed(policy: WatchedPolicy) -> list[PolicyEntry]:
    """Entries beside kept ones that match no call.

    Attention has one operator for each backend, and lists name them all: where one was met, the
    others are its alternatives.
    """
    attends = any(one.kept and _is_attention(one) for one in policy.entries)
    return [
        one
        for one in policy.entries
        if may_keep(policy, one.collection)
        and not one.kept
        and (one.kind != "operator" or not one.met)
        and not (attends and not one.met and _is_attention(one))
    ]


def _is_attention(entry: PolicyEntry) -> bool:
    return words.family_of("::".join(entry.name.split(".")[:2]))[1] == "attention"


def _finding(evidence: Evidence, policy: WatchedPolicy, missed: list[PolicyEntry]) -> Finding:
    packets = [one for one in missed if one.kind == "packet" and one.met]
    lines = [
        f"{one.name} in {one.collection}: "
        + (
            "called was "
            + ", ".join(f"{m.name} ({m.met} times)" for m in overloads_met(policy, one))
            if one.met
            else f"not called in {plural(policy.met, 'operator call')}"
        )
        for one in missed
    ]
    kept = sum(one.kept > 0 for one in policy.entries)
    return RULE.finding(
        evidence,
        confidence="high",
        title=f"{len(missed)} of {len(policy.entries)} operators that the policy {policy.name} "
        f"names {'are' if len(missed) != 1 else 'is'} never met",
        detail=(
            f"{kept} of {len(policy.entries)} entries keep results. The others have no effect in "
            "the recorded step: "
            + (
                "an operator named without its overload equals no call"
                if packets
                else "their operators are not called under this checkpoint"
            )
            + "."
        ),
        evidence=(*describe_decided(policy), *lines),
        fix=Fix(
            summary="Name the overload that is called, such as torch.ops.aten.mm.default."
            if packets
            else "Take the entries out, or name the operators that are called instead.",
            disposition="review",
            diff=spell_overloads(evidence, policy, packets) if packets else None,
            keep="the other entries",
            remove="" if packets else ", ".join(one.name for one in missed),
            docs=POLICY_DOCS,
            reason="What is kept takes memory: see that it fits.",
        ),
    )


RULE = Rule("RS502", "entry-never-met", check, needs="policies")
