"""Which of several checkpoints round one block to keep, and how to take the other out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recompute_scan.advise.diff import removal_diff
from recompute_scan.advise.registry import find_mechanism, title_of
from recompute_scan.result import Checkpoint, Fix
from recompute_scan.run_info import Source

_GENERAL_DOCS = "https://docs.pytorch.org/docs/stable/checkpoint.html"


def advise_removal(checkpoints: Sequence[Checkpoint], sources: Mapping[str, Source]) -> Fix | None:
    """The fix for a block with two or more checkpoints; ``None`` where fewer are known.

    The mechanism that costs least stays; of two equal ones the non-reentrant one, which
    checks what it recomputes and stops early. Switching one to another variant is never
    advised: reentrant hides faults, and both still run.

    Args:
        checkpoints: All checkpoints round the block, outermost first.
        sources: Source statements by call site, from the run's own account.
    """
    if len(checkpoints) < 2:
        return None
    ranked = sorted(checkpoints, key=_preference, reverse=True)
    kept, dropped = ranked[0], ranked[1]
    mechanism = find_mechanism(dropped.mechanism)
    if kept.mechanism is None or mechanism is None:
        return Fix(
            summary="Two checkpoints enclose each block: leave one of them on.",
            disposition="review",
            diff=None,
            keep="the non-reentrant checkpoint, where there is one",
            remove="the other one; record with `recompute-scan run` to see whose line it is",
            docs=_GENERAL_DOCS,
        )
    site = dropped.call_site
    place = f" at {site}" if site else ""
    source = sources.get(site) if site else None
    deletable = source is not None and source.whole_lines and mechanism.removable_call
    diff = removal_diff(site, source) if site and source and deletable else None
    return Fix(
        summary=f"Keep {title_of(kept.mechanism)}; {mechanism.remove}{place}.",
        disposition="review" if mechanism.caution or diff is None else "safe",
        diff=diff,
        keep=_keep(kept, mechanism.caution),
        remove=f"{mechanism.title}{place}",
        docs=mechanism.docs,
        removes=dropped,
    )


def _preference(checkpoint: Checkpoint) -> tuple[int, bool, int]:
    mechanism = find_mechanism(checkpoint.mechanism)
    keep = mechanism.keep if mechanism else 0
    return keep, checkpoint.variant == "non-reentrant", -checkpoint.depth


def _keep(kept: Checkpoint, caution: str | None) -> str:
    mechanism = find_mechanism(kept.mechanism)
    why = mechanism.why_keep if mechanism else "it is enough alone"
    return f"{title_of(kept.mechanism)}: {why}." + (f" {caution}" if caution else "")
