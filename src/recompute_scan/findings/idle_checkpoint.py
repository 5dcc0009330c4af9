"""RS003: checkpointing is switched on and recomputes nothing."""

from __future__ import annotations

from recompute_scan.advise import (
    advise_removal,
    mechanism_of,
    place,
    switch_of,
    take_out,
    title_of,
)
from recompute_scan.findings.base import Answer, NotApplicable, Rule, describe, name_some
from recompute_scan.findings.evidence import Evidence, Stack
from recompute_scan.result import Checkpoint, Finding, Fix, Region
from recompute_scan.run_info import SwitchedOn

_COMPILED = "used"


def check(evidence: Evidence) -> Answer:
    """One finding for each set of idle blocks, and for each switch that no call came from."""
    if not evidence.annotated and not evidence.switched_on:
        return NotApplicable(
            "A checkpoint that recomputes nothing shows only in a trace that `recompute-scan run` "
            "recorded."
        )
    stacks = evidence.stacks(lambda r: bool(r.checkpoints) and r.recompute_runs_per_backward == 0)
    found = [_idle(evidence, stack, regions) for stack, regions in stacks.items()]
    # A compiled checkpoint is part of the graph and calls nothing.
    if evidence.environment.get("torch_compile") != _COMPILED:
        found += [
            _unused(evidence, one)
            for one in evidence.switched_on
            if one.mechanism not in evidence.mechanisms
        ]
    return found


def _idle(evidence: Evidence, stack: Stack, regions: list[Region]) -> Finding:
    return RULE.finding(
        evidence,
        title=f"{evidence.of_blocks(regions)} are checkpointed and none of "
        "their work is recomputed",
        detail=(
            "The backward pass asked for nothing inside these blocks: all that they save is "
            "their own input, or something else takes their tensors first, such as "
            "save_on_cpu. The checkpoint frees no memory here, and costs a little host time."
        ),
        evidence=(
            *(describe(checkpoint) for checkpoint in stack),
            *name_some(regions),
        ),
        fix=_fix(evidence, stack),
    )


def _fix(evidence: Evidence, stack: Stack) -> Fix | None:
    if len(stack) > 1:
        return advise_removal(stack, evidence.sources, evidence.alone, evidence.run)
    mechanism = mechanism_of(stack[0])
    if mechanism is None:
        return None
    works = any(
        region.recompute_runs_per_backward > 0
        and switch_of(stack[0]) in map(switch_of, region.checkpoints)
        for region in evidence.regions
    )
    return take_out(stack[0], mechanism, evidence.sources, lost=works, run=evidence.run)


def _unused(evidence: Evidence, switched: SwitchedOn) -> Finding:
    title = title_of(Checkpoint(0, None, switched.mechanism))
    where = place(switched.site)
    return RULE.finding(
        evidence,
        severity="warning",
        title=f"{title[:1].upper()}{title[1:]} is switched on{where}, and no checkpoint was called",
        detail=(
            "None of the recorded steps called a checkpoint of this kind. The model may be in "
            "evaluation mode (call model.train()), its layers may not take part in these steps, "
            "or its code may never ask for the checkpoint. The memory that it should free is "
            "not freed."
        ),
        evidence=(f"{title}: on when recording began{where}, 0 calls",),
    )


RULE = Rule("RS003", "idle-checkpoint", check)
