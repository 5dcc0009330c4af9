"""How long a step takes in each arrangement that was rehearsed.

Steps of several arms took turns. A machine that gets slower or faster on the way does so for
neighbouring steps alike, so arms are compared pair by pair: an arm takes today's step times the
median of its steps' ratios to today's beside them. Where an arm is what the script does today by
another way, both made the same steps, and each pair is worth its mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from msgspec import Struct

from recompute_scan.intervals import FEWEST_PAIRS, median_interval, pair_interval
from recompute_scan.rehearsal import (
    ArmMeasured,
    Candidate,
    Rehearsal,
    Way,
    fixed_places,
    usual_ms,
    whole_places,
)

# Modules of one class whose recomputes differ by less than this are taken to be as fast.
_ALIKE = 0.25


class ArmTimes(Struct, frozen=True):
    """What a step takes.

    Attributes:
        ms: By arrangement, those that were measured.
        surely_longer: Those whose steps are longer than without checkpoints beyond doubt.
    """

    ms: dict[Way, float]
    surely_longer: frozenset[Way]


def arm_of_way(arms: Sequence[ArmMeasured], way: Way) -> ArmMeasured:
    """The first of these that was measured this way."""
    return next(arm for arm in arms if arm.way == way)


def steps_together(ranks: Sequence[Rehearsal]) -> dict[Way, tuple[float, ...]]:
    """Step times by arrangement, ms: a step is over when the last rank has made it."""
    each: dict[Way, list[tuple[float, ...]]] = defaultdict(list)
    for one in ranks:
        for arm in one.arms:
            each[arm.way].append(arm.steps_ms)
    return {way: tuple(map(max, zip(*steps, strict=False))) for way, steps in each.items()}


def arm_times(ranks: Sequence[Rehearsal]) -> ArmTimes:
    """What the ranks' steps come to, of the arrangements that all of them measured."""
    steps = steps_together(ranks)
    for way in ("keep", "recompute"):
        if _is_todays(ranks, way, steps):
            both = zip(steps["today"], steps[way], strict=False)
            steps["today"] = steps[way] = tuple((one + other) / 2 for one, other in both)
    today = usual_ms(steps["today"])
    longer = (way for way, times in steps.items() if _surely_longer(steps["keep"], times))
    return ArmTimes(
        {way: today * _ratio(steps["today"], times) for way, times in steps.items()},
        frozenset(longer),
    )


def shared_out(
    longer: float,
    candidates: Sequence[Candidate],
    times: Sequence[float],
    fixed: frozenset[int],
    *,
    sure: bool,
) -> tuple[float, ...]:
    """What the steps of an arm take more, shared out by its recomputes' own times, ms.

    Args:
        longer: What they take more, ms.
        candidates: The modules.
        times: What the recompute of each took, ms.
        fixed: Those that have none.
        sure: Whether they take more for certain; else they take what their recomputes did.
    """
    even = _evened(candidates, times, fixed)
    whole = sum(even)
    extra = longer if sure else max(whole, longer)
    share = extra / whole if whole > 0 else 0.0
    return tuple(share * time for time in even)


def _is_todays(ranks: Sequence[Rehearsal], way: Way, steps: dict[Way, tuple[float, ...]]) -> bool:
    """Does the script checkpoint what this arrangement does?"""
    for one in ranks:
        free = set(range(len(one.candidates))) - fixed_places([one])
        on = {place for place in free if one.candidates[place].checkpointed}
        free.intersection_update(whole_places(one.candidates))
        today, other = (arm_of_way(one.arms, each) for each in ("today", way))
        if on != (free if way == "recompute" else set()) or today.saved_bytes != other.saved_bytes:
            return False
    if way == "keep":
        return True
    # Two checkpoints around a module hold what one does, and take longer.
    pairs = list(zip(steps["today"], steps[way], strict=False))
    if len(pairs) < FEWEST_PAIRS:
        return False
    low, high = pair_interval(pairs)
    return low <= 1 <= high


def _surely_longer(keep: Sequence[float], times: Sequence[float]) -> bool:
    pairs = zip(keep, times, strict=False)
    return median_interval([after - before for before, after in pairs] or [0.0])[0] > 0


def _ratio(today: Sequence[float], times: Sequence[float]) -> float:
    pairs = zip(today, times, strict=False)
    return median([time / one for one, time in pairs if one > 0] or [0.0])


def _evened(
    candidates: Sequence[Candidate], times: Sequence[float], fixed: frozenset[int]
) -> list[float]:
    """Recompute times; those of one class that are about the same are the same."""
    groups: dict[str, list[list[int]]] = defaultdict(list)
    for place in sorted(set(range(len(times))) - fixed, key=lambda n: times[n]):
        alike = groups[candidates[place].module_class]
        if alike and times[place] <= (1 + _ALIKE) * times[alike[-1][0]]:
            alike[-1].append(place)
        else:
            alike.append([place])
    found = [0.0] * len(times)
    for group in (group for alike in groups.values() for group in alike):
        for place in group:
            found[place] = median([times[n] for n in group])
    return found
