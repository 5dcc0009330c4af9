"""RS401: a recompute draws other random numbers than the forward that it repeats."""

from __future__ import annotations

from recompute_scan.findings.base import Answer, Rule
from recompute_scan.findings.differences import (
    CHECKPOINT_DOCS,
    Fault,
    consequence,
    describe_operation,
    find_faults,
    set_back,
)
from recompute_scan.findings.evidence import RunEvidence
from recompute_scan.result import Finding, Fix
from recompute_scan.units import ms


def check(evidence: RunEvidence) -> Answer:
    """One finding for each operator that draws anew, with all blocks in which it does."""
    return [_finding(evidence, fault) for fault in find_faults(evidence, {"random"})]


def _finding(evidence: RunEvidence, fault: Fault) -> Finding:
    then = consequence(evidence, fault.regions)
    return RULE.finding(
        evidence,
        severity=then.severity,
        confidence=then.confidence,
        wrong_gradients=then.wrong_gradients,
        title=f"Recomputes of {fault.blocks} draw other random numbers than their forward",
        detail=(
            f"{describe_operation(fault.difference.operation)} starts from another state of "
            f"{fault.difference.generator} in the recompute than in the forward: the gradient is "
            "that of a model with other random numbers than the loss, as far as it depends on "
            f"them. {then.sentence}"
        ),
        evidence=fault.shown(),
        fix=_fix(evidence, fault),
    )


def _fix(evidence: RunEvidence, fault: Fault) -> Fix:
    generator = fault.difference.generator or ""
    diff = None
    if generator.startswith("torch"):
        site = next((region.site for region in fault.regions if region.site), "")
        diff = set_back(evidence, site, "preserve_rng_state", "True")
        summary = "Keep the random state: preserve_rng_state=True, which is torch's default."
        keep = (
            "the checkpoint; one of your own has to save torch's random state in its forward, "
            "restore it for the recompute, and put the later one back"
        )
        remove = "preserve_rng_state=False"
    else:
        summary = (
            f"No checkpoint keeps the state of {generator}. Draw what the block needs outside of "
            "it and pass it in as an argument, or draw it from torch's default generator."
        )
        keep = "the checkpoint"
        remove = f"the call inside the block that draws from {generator}"
    return Fix(
        summary=summary,
        disposition="review",
        diff=diff,
        keep=keep,
        remove=remove,
        docs=CHECKPOINT_DOCS,
        reason=f"Gradients change with it: they become those of the loss.{_price(evidence)}",
    )


def _price(evidence: RunEvidence) -> str:
    """What keeping the state takes, where it was measured."""
    took = evidence.fidelity.keeping_ms if evidence.fidelity is not None else None
    if took is None:
        return ""
    return f" Keeping the random state takes about {ms(took)} of a step here."


RULE = Rule(
    "RS401",
    "random-state-not-restored",
    check_run=check,
    severity="error",
    needs="comparison",
    wrong_gradients=True,
)
