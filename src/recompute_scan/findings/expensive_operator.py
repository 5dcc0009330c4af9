"""RS503: an operator that a policy leaves out costs more for its bytes than all that it keeps."""

from __future__ import annotations

from recompute_scan.deciding import DecidedOperator, WatchedPolicy
from recompute_scan.findings.base import Answer, NotApplicable, Rule, predicted
from recompute_scan.findings.evidence import Evidence
from recompute_scan.findings.memory_headroom import WORTH
from recompute_scan.findings.policy_facts import POLICY_DOCS, describe_decided
from recompute_scan.result import Finding, Fix
from recompute_scan.units import ms, pct, plural, size


def check(evidence: Evidence) -> Answer:
    """One finding for each such operator of a policy that keeps something."""
    cost = evidence.cost
    if cost is None:
        return NotApplicable("There is no step time to compare with.")
    return [
        _finding(evidence, policy, one, cost.step_ms)
        for policy in evidence.decided
        for one in policy.operators
        if (one.recompute_ms_per_step or 0.0) >= WORTH * cost.step_ms and _left_out(policy, one)
    ]


def _left_out(policy: WatchedPolicy, one: DecidedOperator) -> bool:
    """Is it always recomputed, and dearer by its bytes than the policy's own cheapest choice?"""
    if one.kept or one.recomputed < one.met or not one.result_bytes:
        return False
    prices = [
        (kept.forward_ms_per_step or 0.0) / kept.kept_bytes
        for kept in policy.operators
        if kept.kept_bytes and kept.forward_ms_per_step is not None and kept.served
    ]
    return bool(prices) and (one.recompute_ms_per_step or 0.0) / one.result_bytes > min(prices)


def _finding(
    evidence: Evidence, policy: WatchedPolicy, one: DecidedOperator, step_ms: float
) -> Finding:
    time = one.recompute_ms_per_step or 0.0
    share = 100 * time / step_ms
    return RULE.finding(
        evidence,
        confidence=predicted(evidence),
        title=f"{one.name} is recomputed under the policy {policy.name}, for {ms(time)} per step",
        detail=(
            f"That is {pct(share)} of the step; kept, its {plural(one.met, 'result')} would take "
            f"{size(one.result_bytes)}. For each byte that is more time than at least one of the "
            "operators that the policy keeps."
        ),
        evidence=(
            *describe_decided(policy),
            f"{one.name}: met {one.met} times, recomputed {one.recomputed} times",
        ),
        fix=Fix(
            summary=f"Keep torch.ops.{one.name} too, if its {size(one.result_bytes)} fit.",
            disposition="review",
            diff=None,
            keep="what the policy keeps already",
            remove="",
            docs=POLICY_DOCS,
            reason="It takes memory.",
        ),
        saving_ms=time,
        saving_pct=share,
    )


RULE = Rule("RS503", "expensive-op-not-listed", check, needs="policies")
