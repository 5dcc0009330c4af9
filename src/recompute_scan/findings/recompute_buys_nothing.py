"""RS505: an operator is recomputed whose result was in memory all the time."""

from __future__ import annotations

from recompute_scan.deciding import DecidedOperator, WatchedPolicy
from recompute_scan.findings.base import Answer, NotApplicable, Rule, predicted
from recompute_scan.findings.evidence import Evidence
from recompute_scan.findings.policy_facts import DearOperator, dear_ones, describe_decided, keep_too
from recompute_scan.result import Finding
from recompute_scan.units import ms, plural, size


def check(evidence: Evidence) -> Answer:
    """One finding for each such operator that takes time."""
    found = dear_ones(evidence, _frees_nothing)
    if isinstance(found, NotApplicable):
        return found
    return [_finding(evidence, dear) for dear in found]


def _frees_nothing(_: WatchedPolicy, one: DecidedOperator) -> bool:
    """Was all that it returned still there when the backward pass began?"""
    return one.recomputed >= one.met > 0 and 0 < one.result_bytes == one.held_bytes


def _finding(evidence: Evidence, dear: DearOperator) -> Finding:
    one = dear.operator
    return RULE.finding(
        evidence,
        confidence=predicted(evidence),
        title=f"Recomputing {one.name} costs {ms(dear.ms)} per step and frees nothing",
        detail=(
            f"Its {plural(one.met, 'result')} ({size(one.held_bytes)}) were all in memory when "
            "the backward pass began, because something else holds them: the next block's input, "
            "or a variable. Kept by the policy they would take no memory beside that."
        ),
        evidence=(
            *describe_decided(dear.policy),
            f"{one.name}: {size(one.result_bytes)} returned, {size(one.held_bytes)} still there",
        ),
        fix=keep_too(
            f"Keep torch.ops.{one.name} too: its results are in memory anyhow.",
            "Other calls of the operator may have results that are freed today.",
        ),
        saving_ms=dear.ms,
        saving_pct=dear.pct,
    )


RULE = Rule("RS505", "recompute-buys-nothing", check, needs="policies")
