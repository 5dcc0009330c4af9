"""RS505: an operator is recomputed whose result was in memory all the time."""

from __future__ import annotations

from recompute_scan.deciding import DecidedOperator, WatchedPolicy
from recompute_scan.findings.base import Answer, NotApplicable, Rule, predicted
from recompute_scan.findings.evidence import Evidence
from recompute_scan.findings.memory_headroom import WORTH
from recompute_scan.findings.policy_facts import POLICY_DOCS, describe_decided
from recompute_scan.result import Finding, Fix
from recompute_scan.units import ms, plural, size


def check(evidence: Evidence) -> Answer:
    """One finding for each such operator that takes time."""
    cost = evidence.cost
    if cost is None:
        return NotApplicable("There is no step time to compare with.")
    return [
        _finding(evidence, policy, one, cost.step_ms)
        for policy in evidence.decided
        for one in policy.operators
        if (one.recompute_ms_per_step or 0.0) >= WORTH * cost.step_ms and _frees_nothing(one)
    ]


def _frees_nothing(one: DecidedOperator) -> bool:
    """Was all that it returned still there when the backward pass began?"""
    return one.recomputed >= one.met > 0 and 0 < one.result_bytes == one.held_bytes


def _finding(
    evidence: Evidence, policy: WatchedPolicy, one: DecidedOperator, step_ms: float
) -> Finding:
    time = one.recompute_ms_per_step or 0.0
    return RULE.finding(
        evidence,
        confidence=predicted(evidence),
        title=f"Recomputing {one.name} costs {ms(time)} per step and frees nothing",
        detail=(
            f"Its {plural(one.met, 'result')} ({size(one.held_bytes)}) were all in memory when "
            "the backward pass began, because something else holds them: the next block's input, "
            "or a variable. Kept by the policy they would take no memory beside that."
        ),
        evidence=(
            *describe_decided(policy),
            f"{one.name}: {size(one.result_bytes)} returned, {size(one.held_bytes)} still there",
        ),
        fix=Fix(
            summary=f"Keep torch.ops.{one.name} too: its results are in memory anyhow.",
            disposition="review",
            diff=None,
            keep="what the policy keeps already",
            remove="",
            docs=POLICY_DOCS,
            reason="Other calls of the operator may have results that are freed today.",
        ),
        saving_ms=time,
        saving_pct=100 * time / step_ms,
    )


RULE = Rule("RS505", "recompute-buys-nothing", check, needs="policies")
