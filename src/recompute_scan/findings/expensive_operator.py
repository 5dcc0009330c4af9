"""RS503: an operator that a policy leaves out costs more for its bytes than all that it keeps."""

from __future__ import annotations

from recompute_scan.deciding import DecidedOperator, WatchedPolicy
from recompute_scan.findings.base import Answer, NotApplicable, Rule, predicted
from recompute_scan.findings.evidence import Evidence
from recompute_scan.findings.policy_facts import DearOperator, dear_ones, describe_decided, keep_too
from recompute_scan.result import Finding
from recompute_scan.units import ms, pct, plural, size


def check(evidence: Evidence) -> Answer:
    """One finding for each such operator of a policy that keeps something."""
    found = dear_ones(evidence, _left_out)
    if isinstance(found, NotApplicable):
        return found
    return [_finding(evidence, dear) for dear in found]


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


def _finding(evidence: Evidence, dear: DearOperator) -> Finding:
    one = dear.operator
    return RULE.finding(
        evidence,
        confidence=predicted(evidence),
        title=(
            f"{one.name} is recomputed under the policy {dear.policy.name}, "
            f"for {ms(dear.ms)} per step"
        ),
        detail=(
            f"That is {pct(dear.pct)} of the step; kept, its {plural(one.met, 'result')} would "
            f"take {size(one.result_bytes)}. For each byte that is more time than at least one of "
            "the operators that the policy keeps."
        ),
        evidence=(
            *describe_decided(dear.policy),
            f"{one.name}: met {one.met} times, recomputed {one.recomputed} times",
        ),
        fix=keep_too(
            f"Keep torch.ops.{one.name} too, if its {size(one.result_bytes)} fit.",
            "It takes memory.",
        ),
        saving_ms=dear.ms,
        saving_pct=dear.pct,
    )


RULE = Rule("RS503", "expensive-op-not-listed", check, needs="policies")
