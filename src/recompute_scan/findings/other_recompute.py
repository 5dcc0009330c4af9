"""RS403: a recompute is another computation than the forward that it repeats."""

from __future__ import annotations

from recompute_scan.faithful import Difference, DifferenceKind
from recompute_scan.findings.base import Answer, Rule
from recompute_scan.findings.differences import (
    CHECKPOINT_DOCS,
    Fault,
    consequence,
    describe_operation,
    find_faults,
)
from recompute_scan.findings.evidence import RunEvidence
from recompute_scan.result import Finding, Fix

_KINDS: tuple[DifferenceKind, ...] = ("input", "argument", "shape", "operators", "value")


def check(evidence: RunEvidence) -> Answer:
    """One finding for each operator at which a recompute leaves the forward's way."""
    return [_finding(evidence, fault) for fault in find_faults(evidence, _KINDS)]


def _finding(evidence: RunEvidence, fault: Fault) -> Finding:
    difference = fault.difference
    then = consequence(evidence, fault.regions)
    return RULE.finding(
        evidence,
        severity=then.severity,
        confidence=then.confidence,
        wrong_gradients=then.wrong_gradients,
        title=f"Recomputes of {fault.blocks} are not the computation of their forward",
        detail=f"{_why(difference)} {then.sentence}",
        evidence=fault.shown(),
        fix=Fix(
            summary=_what_to_do(difference),
            disposition="review",
            diff=None,
            keep="the checkpoint",
            remove="what changes between the forward and the backward pass",
            docs=CHECKPOINT_DOCS,
            reason="Gradients change with it: they become those of the loss.",
        ),
    )


def _why(difference: Difference) -> str:
    where = describe_operation(difference.operation)
    if difference.kind == "input":
        return (
            f"{where} gets a tensor from outside the block that is no longer what it was in the "
            "forward: it was written, or replaced, before the backward pass came to it."
        )
    if difference.kind == "argument":
        return (
            f"{where} is called with {difference.recompute} where the forward had "
            f"{difference.forward}: the block depends on a value that changes from call to call."
        )
    if difference.kind == "shape":
        return (
            f"{where} gives a tensor of shape {difference.recompute}, in the forward "
            f"{difference.forward}: something that the block uses has grown or shrunk."
        )
    if difference.kind == "operators":
        expected = difference.instead_of or "nothing more"
        return (
            f"The recompute calls {where}, where the forward had {expected}: another branch was "
            "taken."
        )
    return f"{where} gets the same and gives another result."


def _what_to_do(difference: Difference) -> str:
    if difference.kind == "input":
        return (
            "Leave what the block reads as it is until the backward pass has run: no edit in "
            "place, and buffers that the block itself writes are to be written outside of it."
        )
    if difference.kind in ("argument", "operators"):
        return (
            "Decide outside the block and pass the decision in as an argument, which the "
            "checkpoint keeps: no counter, flag or global that a call of the block changes."
        )
    if difference.kind == "shape":
        return (
            "Leave caches out of checkpointed blocks: use_cache=False in training, and nothing "
            "appended to what outlives the call."
        )
    return (
        "Find what the operator depends on beside its arguments; run --verify compares the "
        "gradients."
    )


RULE = Rule(
    "RS403",
    "recompute-differs",
    check_run=check,
    severity="error",
    needs="comparison",
    wrong_gradients=True,
)
