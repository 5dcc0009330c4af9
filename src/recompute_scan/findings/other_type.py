"""RS402: a recompute works in another number type than the forward that it repeats."""

from __future__ import annotations

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


def check(evidence: RunEvidence) -> Answer:
    """One finding for each operator whose result has another type."""
    return [_finding(evidence, fault) for fault in find_faults(evidence, {"type"})]


def _finding(evidence: RunEvidence, fault: Fault) -> Finding:
    difference = fault.difference
    then = consequence(evidence, fault.regions)
    return RULE.finding(
        evidence,
        severity=then.severity,
        confidence=then.confidence,
        wrong_gradients=then.wrong_gradients,
        title=(
            f"Recomputes of {fault.blocks} work in {difference.recompute}, their forward in "
            f"{difference.forward}"
        ),
        detail=(
            f"{describe_operation(difference.operation)} gives {difference.recompute} in the "
            f"recompute and {difference.forward} in the forward. A context that was entered around "
            "the forward, such as autocast or an FP8 recipe, is not there when the backward pass "
            f"runs it again. {then.sentence}"
        ),
        evidence=fault.shown(),
        fix=Fix(
            summary=(
                "Enter the context inside the checkpointed function, so that the recompute enters "
                "it too. torch's own checkpoint restores torch.autocast; one that is written by "
                "hand has to do that itself, and a library's recipe is restored by the library's "
                "checkpoint only."
            ),
            disposition="review",
            diff=None,
            keep="the checkpoint",
            remove="the context around the call of the checkpoint",
            docs=CHECKPOINT_DOCS,
            reason="Gradients change with it: they are computed in the forward's type.",
        ),
    )


RULE = Rule(
    "RS402",
    "recompute-in-other-type",
    check_run=check,
    severity="error",
    needs="comparison",
    wrong_gradients=True,
)
