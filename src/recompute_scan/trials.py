"""Runs of one script that are compared: how each ended, their gradients, and what to try next."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct

from recompute_scan.faithful import ComparedGradients, Sampled
from recompute_scan.result import GradientDistance, Gradients, Region, Result
from recompute_scan.run_info import Measurements, RunInfo, step_has_fix

# Runs for this at most; what is left then stays untold.
_MOST_RUNS = 12
_WORST = 10
# A gradient sums over many operators, each of which rounds.
_ROUNDINGS = 30
# As far as the script's own gradients are from run to run, times this, nothing is told.
_FAR = 10
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|MemoryError|can't allocate memory", re.I
)
_KILLED = 137  # by SIGKILL, which is how Linux takes back memory


class Trial(Struct, frozen=True):
    """One run of the script.

    Attributes:
        records: What its ranks left, rank 0 first; empty where none did.
        exit_status: Of the script, or of what started it.
        result: What its trace showed, where it recorded one.
        gradients: Of its first step, on rank 0; empty where they were not seen.
    """

    records: tuple[RunInfo, ...]
    exit_status: int = 0
    result: Result | None = None
    gradients: tuple[Sampled, ...] = ()

    @property
    def measured(self) -> list[Measurements]:
        """What each rank measured."""
        return [info.measured for info in self.records if info.measured is not None]

    @property
    def timed_ms(self) -> tuple[float, ...]:
        """Rank 0's timed steps. Ranks wait for one another in every step."""
        return self.records[0].timed_steps_ms if self.records else ()

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """Of a run that switched the fix on and off: neighbouring steps, unchanged and with it."""
        times = self.timed_ms
        return [
            (times[at + 1], times[at]) if step_has_fix(at) else (times[at], times[at + 1])
            for at in range(0, len(times) - 1, 2)
        ]

    @property
    def came_through(self) -> bool:
        """Whether the script ended well and steps were timed."""
        return self.exit_status == 0 and bool(self.timed_ms) and bool(self.measured)


def ran_out(trial: Trial) -> bool:
    """Whether it ended for want of memory, as far as what it left tells."""
    said = [info.message for info in trial.records if info.message]
    return trial.exit_status == _KILLED or any(_OUT_OF_MEMORY.search(text) for text in said)


def message(trial: Trial) -> str:
    """What it ended with, in one sentence."""
    said = [info.message for info in trial.records if info.message]
    return said[0] if said else f"It ended with exit status {trial.exit_status}."


def most(trials: Sequence[Trial], value: Callable[[Measurements], int | None]) -> int | None:
    """The largest value over all ranks of these runs; ``None`` where none is known."""
    found = [value(measured) for trial in trials for measured in trial.measured]
    return max((number for number in found if number is not None), default=None)


def compare_gradients(
    mine: Sequence[Sampled], others: Sequence[Sampled], again: Sequence[Sampled] = ()
) -> Gradients:
    """How far gradients and buffers after the first step are from those of another run.

    Args:
        mine: Of the script as it is.
        others: Of the run to compare with.
        again: Of a second run of the script as it is; empty where there was none.
    """
    theirs = {(one.name, one.is_buffer): one for one in others}
    twice = {(one.name, one.is_buffer): one for one in again}
    pairs = [(one, theirs[key]) for one in mine if (key := (one.name, one.is_buffer)) in theirs]
    if not pairs:
        return Gradients("not-seen")
    apart = [(one, one.distance(other)) for one, other in pairs]
    repeats = [
        one.distance(twice[key]) for one, _ in pairs if (key := (one.name, one.is_buffer)) in twice
    ]
    repeat = max(repeats, default=0.0)
    largest = max(distance for _, distance in apart)
    beyond = [one for one, d in apart if _beyond(one, d, repeat)]
    status: Literal["equal", "rounding", "different", "not-repeatable"]
    if largest == 0.0:
        status = "equal"
    elif beyond:
        status = "different"
    else:
        status = "rounding" if repeat == 0.0 else "not-repeatable"
    worst = sorted(apart, key=lambda pair: -pair[1])[:_WORST]
    return Gradients(
        status,
        compared=len(pairs),
        worst=tuple(
            GradientDistance(one.name, one.is_buffer, d if math.isfinite(d) else None)
            for one, d in worst
            if d
        ),
    )


def differing_gradients(
    mine: Sequence[Sampled], others: Sequence[Sampled], again: Sequence[Sampled] = ()
) -> ComparedGradients | None:
    """Which gradients are not those of another run; ``None`` where that cannot be told, of a script
    too that gives others each time. Arguments as of :func:`compare_gradients`.
    """
    seen = [[one for one in run if not one.is_buffer] for run in (mine, others, again)]
    found = compare_gradients(*seen)
    if found.status in ("not-seen", "not-repeatable"):
        return None
    theirs, twice = ({one.name: one for one in run} for run in seen[1:])
    pairs = [(one, theirs[one.name]) for one in seen[0] if one.name in theirs]
    repeat = max(
        (one.distance(twice[one.name]) for one, _ in pairs if one.name in twice), default=0
    )
    beyond = tuple(one.name for one, other in pairs if _beyond(one, one.distance(other), repeat))
    return ComparedGradients(found.compared, beyond, equal=found.status == "equal")


def _beyond(one: Sampled, distance: float, repeat: float) -> bool:
    """Is it further off than rounding and the script's own differences explain?"""
    return distance > max(_ROUNDINGS * one.rounding, _FAR * repeat)


def worst_of(several: Sequence[Gradients]) -> Gradients:
    """One answer for several runs that each had other checkpoints taken out: the worst, with the
    largest distance of each gradient.
    """
    order = ("not-seen", "equal", "rounding", "not-repeatable", "different")
    distances: dict[tuple[str, bool], GradientDistance] = {}
    for one in (one for each in several for one in each.worst):
        known = distances.get((one.name, one.is_buffer))
        if known is None or _far(one) > _far(known):
            distances[one.name, one.is_buffer] = one
    return Gradients(
        max((each.status for each in several), key=order.index),
        compared=max(each.compared for each in several),
        worst=tuple(sorted(distances.values(), key=_far, reverse=True)[:_WORST]),
    )


def _far(one: GradientDistance) -> float:
    return math.inf if one.distance is None else one.distance


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
