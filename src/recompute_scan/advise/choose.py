"""Which of several checkpoints round one block to keep, and how to take the other out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from recompute_scan.advise.diff import change_diff
from recompute_scan.advise.edit import edited
from recompute_scan.advise.mechanism import Mechanism
from recompute_scan.advise.registry import find_mechanism, title_of
from recompute_scan.annotations import COUNTS_RUNS
from recompute_scan.result import Checkpoint, Fix
from recompute_scan.run_info import Source

_GENERAL_DOCS = "https://docs.pytorch.org/docs/stable/checkpoint.html"

# What tells two switches apart: the mechanism and the line that set it.
Switch = tuple[str | None, str | None]


def advise_removal(
    checkpoints: Sequence[Checkpoint],
    sources: Mapping[str, Source],
    alone: Collection[Switch] = (),
) -> Fix | None:
    """The fix for a block with two or more checkpoints; ``None`` where fewer are known.

    The mechanism that costs least stays; of two equal ones the non-reentrant one, which
    checks what it recomputes and stops early. Switching one to another variant is never
    advised: reentrant hides faults, and both still run.

    Args:
        checkpoints: All checkpoints round the block, outermost first.
        sources: Source statements by call site, from the run's own account.
        alone: Switches that elsewhere are the only checkpoint of a block, which would lose it.
    """
    if len(checkpoints) < 2:
        return None
    kept, dropped = keep_and_drop(checkpoints, alone)
    mechanism = find_mechanism(dropped.mechanism)
    if kept.mechanism is None or mechanism is None:
        return Fix(
            summary="Two checkpoints enclose each block: leave one of them on.",
            disposition="review",
            diff=None,
            keep="the non-reentrant checkpoint, where there is one",
            remove="the other one; record with `recompute-scan run` to see whose line it is",
            docs=_GENERAL_DOCS,
            reason="It is not known which line asked for which checkpoint.",
        )
    fix = take_out(dropped, mechanism, sources, lost=switch_of(dropped) in alone)
    return Fix(
        summary=f"Keep {title_of(kept.mechanism)}; {fix.summary}",
        disposition=fix.disposition,
        diff=fix.diff,
        keep=_keep(kept),
        remove=fix.remove,
        docs=fix.docs,
        removes=fix.removes,
        reason=fix.reason,
    )


def keep_and_drop(
    checkpoints: Sequence[Checkpoint], alone: Collection[Switch] = ()
) -> tuple[Checkpoint, Checkpoint]:
    """Of two or more checkpoints the one to keep, and the first to take out."""

    def preference(checkpoint: Checkpoint) -> tuple[bool, int, bool, int]:
        mechanism = find_mechanism(checkpoint.mechanism)
        return (
            switch_of(checkpoint) in alone,
            mechanism.keep if mechanism else 0,
            checkpoint.variant == "non-reentrant",
            -checkpoint.depth,
        )

    kept, dropped, *_ = sorted(checkpoints, key=preference, reverse=True)
    return kept, dropped


def kept(checkpoints: Sequence[Checkpoint]) -> Checkpoint:
    """The one that stays of one or more checkpoints round a block."""
    return keep_and_drop(checkpoints)[0] if len(checkpoints) > 1 else checkpoints[0]


def take_out(
    dropped: Checkpoint, mechanism: Mechanism, sources: Mapping[str, Source], *, lost: bool = False
) -> Fix:
    """The fix that takes one checkpoint out.

    Args:
        dropped: The checkpoint.
        mechanism: What switched it on.
        sources: Source statements by call site.
        lost: Whether other blocks have only this checkpoint.
    """
    site = dropped.call_site
    place = f" at {site}" if site else ""
    source = sources.get(site) if site else None
    new = edited(source, mechanism.edits) if source else None
    diff = change_diff(site, source, new) if site and source and new is not None else None
    reason = _reason(dropped, mechanism, found=diff is not None, lost=lost)
    return Fix(
        summary=f"{mechanism.remove}{place}.",
        disposition="review" if reason else "safe",
        diff=diff,
        keep="",
        remove=f"{mechanism.title}{place}",
        docs=mechanism.docs,
        removes=dropped,
        reason=reason,
    )


def switch_of(checkpoint: Checkpoint) -> Switch:
    """Which switch turned this checkpoint on."""
    return checkpoint.mechanism, checkpoint.call_site


def _reason(dropped: Checkpoint, mechanism: Mechanism, *, found: bool, lost: bool) -> str | None:
    """Why the fix needs a look; ``None`` where it cannot change the results of training."""
    if not found:
        return "The line to change was not found, so there is no diff to check."
    if lost:
        return "Other blocks have only this checkpoint, and would need more memory without it."
    if COUNTS_RUNS in dropped.options:
        return (
            "Modules in the block count their own runs (running statistics), and will count "
            "fewer, as they would without checkpointing."
        )
    return mechanism.caution


def _keep(kept: Checkpoint) -> str:
    mechanism = find_mechanism(kept.mechanism)
    why = mechanism.why_keep if mechanism else "it is enough alone"
    return f"{title_of(kept.mechanism)}: {why}."
