"""RS008: non-reentrant recomputes run to the end of their block, because early stop is off."""

from __future__ import annotations

from collections import defaultdict

from recompute_scan.advise import title_of
from recompute_scan.annotations import EARLY_STOP_OFF
from recompute_scan.findings.base import Answer, NotApplicable, Rule, describe, name_some
from recompute_scan.findings.evidence import Evidence
from recompute_scan.result import Checkpoint, Finding, Fix

_DOCS = "https://docs.pytorch.org/docs/stable/checkpoint.html"


def check(evidence: Evidence) -> Answer:
    """One finding for each mechanism whose checkpoints are called with early stop off."""
    if not evidence.annotated and evidence.verdict != "none":
        return NotApplicable(
            "Whether early stop was on shows only in a trace that `recompute-scan run` recorded."
        )
    found = {
        checkpoint: None
        for region in evidence.regions
        for checkpoint in region.checkpoints
        if EARLY_STOP_OFF in checkpoint.options and region.recompute_runs_per_backward
    }
    off: dict[tuple[str | None, str | None], list[Checkpoint]] = defaultdict(list)
    for checkpoint in found:
        off[checkpoint.mechanism, checkpoint.function].append(checkpoint)
    return [_finding(evidence, checkpoints) for checkpoints in off.values()]


def _finding(evidence: Evidence, checkpoints: list[Checkpoint]) -> Finding:
    regions = [r for r in evidence.regions if not set(checkpoints).isdisjoint(r.checkpoints)]
    title = title_of(checkpoints[0])
    nested = any(len(region.checkpoints) > 1 for region in regions)
    return RULE.finding(
        evidence,
        severity="warning" if nested else "info",
        title=f"{evidence.of_blocks(regions)} are recomputed to their end: early stop is off",
        detail=(
            "A non-reentrant recompute may stop as soon as it has the last tensor that the "
            "backward pass needs, which leaves out a block's last operators. Here it goes on to "
            "the end."
            + (
                " Around another non-reentrant checkpoint that also makes it recompute the block "
                "a second time."
                if nested
                else ""
            )
        ),
        evidence=(
            *map(describe, checkpoints),
            *name_some(regions),
        ),
        fix=Fix(
            summary=(
                "Leave early stop on: no set_checkpoint_early_stop(False) and no "
                f"early_stop=False in {title}."
            ),
            disposition="review",
            diff=None,
            keep=title,
            remove="early_stop=False, or set_checkpoint_early_stop(False)",
            docs=_DOCS,
            reason=(
                "Some frameworks turn it off so that hooks and side effects at the end of a "
                "block run in each recompute."
            ),
        ),
    )


RULE = Rule("RS008", "early-stop-off", check)
