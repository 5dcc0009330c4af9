"""Repeated and unused work of a training step, and memory that it keeps unused."""

from __future__ import annotations

from collections.abc import Sequence

from recompute_scan.intervals import median_interval
from recompute_scan.result.watched_step import WatchedStep
from recompute_scan.work.groups import kept_of, peak_of, waste_of
from recompute_scan.work.ledger import Ledger
from recompute_scan.work.watch import StepWatch

__all__ = ["Ledger", "StepWatch", "watched_step"]


def watched_step(watch: StepWatch, timed_ms: Sequence[float]) -> WatchedStep:
    """The use of each operator in the first of the two watched steps; of a watch that has ended.

    Args:
        watch: Both steps.
        timed_ms: How long steps took that were not watched.
    """
    if watch.untold is not None:
        return WatchedStep(untold=watch.untold)
    ledger = watch.ledger
    if len(ledger.steps) < 2:
        return WatchedStep(untold="The script ended before the watched step did.")
    step = ledger.first_step
    _steady(ledger)
    ledger.step_ms = median_interval(timed_ms)[1] if timed_ms else None
    found = waste_of(ledger)
    peak, moment = peak_of(ledger)
    return WatchedStep(
        operators=len(step),
        ms=sum(one.ms for one in step),
        recomputed_ms=sum(one.ms for one in step if one.phase == "recompute"),
        work=found.work,
        small_ms=found.small_ms,
        library_ms=found.library_ms,
        kept=kept_of(ledger),
        peak_bytes=peak,
        peak_in=step[moment].phase if step else "",
        hidden=ledger.hidden,
    )


def _steady(ledger: Ledger) -> None:
    """Where both steps run the same operators, take the shorter time of each.

    Whatever else the machine does makes an operator longer, never shorter.
    """
    first, end = ledger.first_step, ledger.first_step_ends
    second = ledger.operations[end : end + len(first)]
    if [one.name for one in first] == [one.name for one in second]:
        for one, again in zip(first, second, strict=True):
            one.ms = min(one.ms, again.ms)
