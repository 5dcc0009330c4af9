"""RS003: checkpointing is switched on and recomputes nothing."""

from __future__ import annotations

import re
from collections import defaultdict

from recompute_scan.advise import (
    advise_removal,
    mechanism_of,
    place,
    switch_of,
    take_out,
    title_of,
)
from recompute_scan.annotations import REGION, parse_region
from recompute_scan.findings.base import Evidence, NotApplicable, Rule, describe, no_verdict
from recompute_scan.result import Checkpoint, Finding, Fix, Region
from recompute_scan.run_info import SwitchedOn

_COMPILED = "used"
_REGION = re.compile(re.escape(REGION))


def check(evidence: Evidence) -> list[Finding] | NotApplicable:
    """One finding for each set of idle blocks, and for each switch that no call came from."""
    if unknown := no_verdict(evidence):
        return unknown
    if evidence.facts.annotations is None and not evidence.switched_on:
        return NotApplicable(
            "A checkpoint that recomputes nothing shows only in a trace that `recompute-scan run` "
            "recorded."
        )
    stacks: dict[tuple[Checkpoint, ...], list[Region]] = defaultdict(list)
    for region in evidence.regions:
        if region.checkpoints and region.recompute_runs_per_backward == 0:
            stacks[region.checkpoints].append(region)
    found = [_idle(evidence, stack, regions) for stack, regions in stacks.items()]
    # A compiled checkpoint is part of the graph and calls nothing.
    if evidence.environment.get("torch_compile") != _COMPILED:
        found += [_unused(evidence, one) for one in evidence.switched_on if _unseen(evidence, one)]
    return found


def _idle(evidence: Evidence, stack: tuple[Checkpoint, ...], regions: list[Region]) -> Finding:
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="info",
        confidence=evidence.confidence,
        title=f"{len(regions)} of {len(evidence.regions)} blocks are checkpointed and none of "
        "their work is recomputed",
        detail=(
            "The backward pass asked for nothing inside these blocks: all that they save is "
            "their own input, or something else takes their tensors first, such as "
            "save_on_cpu. The checkpoint frees no memory here, and costs a little host time."
        ),
        evidence=(
            *(describe(checkpoint) for checkpoint in stack),
            *(region.module or region.signature for region in regions[:3]),
        ),
        fix=_fix(evidence, stack),
        saving_ms=None,
        saving_pct=None,
    )


def _fix(evidence: Evidence, stack: tuple[Checkpoint, ...]) -> Fix | None:
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


def _unseen(evidence: Evidence, switched: SwitchedOn) -> bool:
    seen = {
        checkpoint.mechanism for region in evidence.regions for checkpoint in region.checkpoints
    }
    # Those too that were called in another checkpoint's recompute alone.
    calls = evidence.facts.calls
    found = (parse_region(calls.names[calls.name[row]]) for row in calls.named(_REGION))
    seen |= {annotation.mechanism for annotation in found if annotation is not None}
    return switched.mechanism not in seen


def _unused(evidence: Evidence, switched: SwitchedOn) -> Finding:
    title = title_of(Checkpoint(0, None, switched.mechanism))
    where = place(switched.site)
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="warning",
        confidence=evidence.confidence,
        title=f"{title[:1].upper()}{title[1:]} is switched on{where}, and no checkpoint was called",
        detail=(
            "None of the recorded steps called a checkpoint of this kind. The model may be in "
            "evaluation mode (call model.train()), its layers may not take part in these steps, "
            "or its code may never ask for the checkpoint. The memory that it should free is "
            "not freed."
        ),
        evidence=(f"{title}: on when recording began{where}, 0 calls",),
        fix=None,
        saving_ms=None,
        saving_pct=None,
    )


RULE = Rule("RS003", "idle-checkpoint", check)
