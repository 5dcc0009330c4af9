"""Checkpoints taken out a part at a time, where without any of them memory does not suffice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recompute_scan.result import Region, Result
from recompute_scan.trials import Trial, ran_out

# Runs for this at most; what is left then stays untold.
_MOST_RUNS = 12


def without_in_parts(
    regions: Sequence[Region], run: Callable[[Sequence[Region], int], Trial]
) -> tuple[list[Trial], int]:
    """Runs that together have every checkpoint taken out, as far as they came to their first
    step's end, and around how many regions that was.

    A part that does not fit either is halved, down to single regions.

    Args:
        regions: The regions, in the order of the forward pass.
        run: Runs the script without the checkpoints around some of them; gets the number of the
            run too, from 1.
    """
    came, taken = [], 0
    waiting = _halves(regions)
    number = 0
    while waiting and number < _MOST_RUNS:
        part, number = waiting.pop(0), number + 1
        trial = run(part, number)
        if trial.gradients and not trial.exit_status:
            came.append(trial)
            taken += len(part)
        elif ran_out(trial) and len(part) > 1:
            waiting = [*_halves(part), *waiting]
    return came, taken


def named_regions(result: Result) -> tuple[Region, ...]:
    """The checkpointed regions whose module's name is theirs alone."""
    names = [region.module for region in result.regions]
    return tuple(
        region
        for region in result.regions
        if region.checkpoints and region.module and names.count(region.module) == 1
    )


def _halves(regions: Sequence[Region]) -> list[Sequence[Region]]:
    middle = (len(regions) + 1) // 2
    return [part for part in (regions[:middle], regions[middle:]) if part]
