"""RS006: a reentrant checkpoint under FSDP."""

from __future__ import annotations

from collections import defaultdict

from recompute_scan.advise import find_mechanism, title_of
from recompute_scan.findings.base import Answer, NotApplicable, Rule, describe, name_some
from recompute_scan.findings.evidence import Evidence
from recompute_scan.frameworks.gradients import NON_REENTRANT
from recompute_scan.result import Checkpoint, Finding, Fix, Region

_DOCS = "https://docs.pytorch.org/docs/stable/checkpoint.html"


def check(evidence: Evidence) -> Answer:
    """One finding for each reentrant checkpoint that advice on doubling would leave in place."""
    if not evidence.run.sharded:
        return NotApplicable("The trace shows no FSDP.")
    kept: dict[Checkpoint, list[Region]] = defaultdict(list)
    for region in evidence.regions:
        if not region.checkpoints or not region.recompute_runs_per_backward:
            continue
        stays = region.checkpoints[0]
        if len(region.checkpoints) > 1:
            stays = evidence.keep_and_drop(region.checkpoints)[0]
        if stays.variant == "reentrant":
            kept[stays].append(region)
    return [_finding(evidence, checkpoint, regions) for checkpoint, regions in kept.items()]


def _finding(evidence: Evidence, checkpoint: Checkpoint, regions: list[Region]) -> Finding:
    mechanism = find_mechanism(checkpoint.mechanism)
    return RULE.finding(
        evidence,
        title=f"{evidence.of_blocks(regions)} are checkpointed reentrantly under FSDP",
        detail=(
            "A reentrant recompute runs the whole block, does not compare what it recomputed with "
            "the original, and outside an FSDP unit gathers the parameters once more. With "
            "fully_shard its memory has been reported to grow (pytorch/pytorch issue 169349). "
            "PyTorch advises against the variant."
        ),
        evidence=(
            describe(checkpoint),
            *name_some(regions),
        ),
        fix=Fix(
            summary=(
                "Checkpoint non-reentrantly: pass use_reentrant=False where "
                f"{title_of(checkpoint)} is switched on, or use FSDP's own wrapper."
            ),
            disposition="review",
            diff=None,
            keep="one non-reentrant checkpoint around each block",
            remove="use_reentrant=True, or a default that means it",
            docs=mechanism.docs if mechanism else _DOCS,
            reason=(
                f"{NON_REENTRANT} Its recompute checks what it recomputes, and stops a block that "
                "does not compute the same twice; a reentrant one goes on with wrong gradients."
            ),
        ),
    )


RULE = Rule("RS006", "reentrant-under-fsdp", check, severity="warning")
