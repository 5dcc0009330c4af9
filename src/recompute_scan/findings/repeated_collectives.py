"""RS005: recomputes gather parameters, or communicate otherwise, once more."""

from __future__ import annotations

from recompute_scan.advise import switch_of
from recompute_scan.cost.communication import Repeated
from recompute_scan.findings.base import Answer, NotApplicable, Rule
from recompute_scan.findings.evidence import Evidence
from recompute_scan.result import DOUBLED, Finding, Fix
from recompute_scan.units import ms, size

_GOES = f" They go with the checkpoint that the fix for {DOUBLED} takes out."
_DOCS = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"


def check(evidence: Evidence) -> Answer:
    """One finding for gathers of parameters inside recomputes, and one for other communication."""
    if not evidence.has_collectives:
        return NotApplicable("The trace holds no collective communication.")
    found = []
    if evidence.repeated_gathers.count:
        found.append(_gathers(evidence, evidence.repeated_gathers))
    if evidence.other_repeated.count:
        found.append(_others(evidence, evidence.other_repeated))
    return found


def _gathers(evidence: Evidence, gathers: Repeated) -> Finding:
    goes = _goes_with_the_fix(evidence)
    return RULE.finding(
        evidence,
        severity="warning",
        title=f"Recomputes gather parameters again: {gathers.count:g} of "
        f"{evidence.gathers_per_step:g} all-gathers per step",
        detail=(
            "The checkpoint is outside the FSDP unit, so that its recompute gathers the unit's "
            "parameters once more than the forward and the backward pass need. "
            f"{_time(gathers)}{_GOES if goes else ''}"
        ),
        evidence=_evidence(gathers),
        fix=None
        if goes
        else Fix(
            summary=(
                "Checkpoint inside the FSDP units, non-reentrant: FSDP's own wrapper on the "
                "layers, or the setting of your framework for it."
            ),
            disposition="review",
            diff=None,
            keep="one checkpoint inside each FSDP unit",
            remove="the checkpoint outside",
            docs=_DOCS,
            reason="Which units are checkpointed decides what memory is needed.",
        ),
    )


def _goes_with_the_fix(evidence: Evidence) -> bool:
    """Do the checkpoints go, by the fix for doubled ones, in whose recomputes the gathers are?

    Where no annotation tells whose recomputes they are, the fix for doubled checkpoints comes
    first.
    """
    if evidence.verdict != "doubled":
        return False
    if not evidence.annotated:
        return True
    removed = {
        switch_of(evidence.keep_and_drop(region.checkpoints)[1])
        for region in evidence.regions
        if len(region.checkpoints) > 1
    }
    return evidence.gathering <= removed


def _others(evidence: Evidence, others: Repeated) -> Finding:
    return RULE.finding(
        evidence,
        title=f"Recomputes repeat communication: {others.count:g} collectives per step",
        detail=(
            "The recomputed blocks communicate in their forward, as tensor-parallel and expert "
            f"layers do, and so does every recompute. {_time(others)} Selective "
            "checkpointing that saves what is received avoids it, for memory."
        ),
        evidence=_evidence(others),
    )


def _evidence(found: Repeated) -> list[str]:
    said = [f"{name}: {number:g} per step inside recomputes" for name, number in found.names]
    total = found.communication
    if total.bytes is not None:
        said.append(f"{size(total.bytes)} per step, of each the larger of its input and its output")
    if total.exposed_ms is not None:
        said.append(f"{ms(total.exposed_ms)} per step with no computation beside them")
    return said


def _time(found: Repeated) -> str:
    taken = f"{found.time_ms:.3g} ms of a recorded step"
    if found.on_device:
        return f"They take {taken}."
    return (
        f"To start them takes the host {taken}; how long the step then waits for them is not in "
        "the trace."
    )


RULE = Rule("RS005", "repeated-collectives", check)
