"""Which modules to recompute: the least time for the memory that there is, or the other way round.

What is held at a moment is a sum over storages, each counted once however many hold it. An operator
inside a module holds what it saves where the module is not recomputed; a checkpoint holds the
module's inputs, and while its recompute is used everything that the module saves. So each moment
gives one linear constraint, with a helper variable for every set of modules that share a storage.
Moments that can be the fullest: each module's recompute, and each turn from forward to backward.
HiGHS solves it (``docs/decisions/memory-plan.md``).

A step takes what one without checkpoints takes, and what recomputing everything takes more, shared
out by the recomputes' own times, which are measured where they run. Where the steps vary too much
to say that they take more, those times themselves are added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from recompute_scan.intervals import median_interval
from recompute_scan.rehearsal import ArmMeasured, Candidate, Rehearsal, Way

Bool = npt.NDArray[np.bool_]
_TIME_LIMIT_S = 10.0
# The solver gets MiB, so that its coefficients are of one size.
_SCALE = 2.0**20
# Among arrangements that are as fast the one that holds less is preferred, by so little of a step
# for all memory together.
_PREFERENCE = 1e-6
# Modules of one class whose recomputes differ by less than this are taken to be as fast.
_ALIKE = 0.25

# The arrangements that a rehearsal measures for a plan.
WAYS: tuple[Way, ...] = ("today", "keep", "recompute")

# A module, by its place, and whether it is recomputed.
Condition = tuple[int, bool]


class Moment(Struct, frozen=True):
    """What is held at one moment.

    Attributes:
        always: Bytes, whatever is recomputed.
        terms: Bytes by the conditions of which one has to hold.
    """

    always: int
    terms: tuple[tuple[frozenset[Condition], int], ...]

    def held(self, recomputed: Bool) -> int:
        """Bytes with these modules recomputed."""
        return self.always + sum(
            size
            for literals, size in self.terms
            if any(bool(recomputed[place]) is again for place, again in literals)
        )


class Arrangements(Struct, frozen=True):
    """All arrangements of checkpoints of one step, with what they take.

    Attributes:
        candidates: The modules.
        moments: When it may be fullest.
        again_ms: What the recompute of each module takes of a step, ms.
        keep_ms: A step with nothing recomputed, ms.
        fixed: Modules that cannot be recomputed, because no backward pass was seen of them.
    """

    candidates: tuple[Candidate, ...]
    moments: tuple[Moment, ...]
    again_ms: tuple[float, ...]
    keep_ms: float
    fixed: frozenset[int] = frozenset()

    @property
    def nothing(self) -> Bool:
        """Nothing is recomputed."""
        return np.zeros(len(self.candidates), np.bool_)

    @property
    def everything(self) -> Bool:
        """Everything is that can be."""
        return np.array([n not in self.fixed for n in range(len(self.candidates))], np.bool_)

    def peak(self, recomputed: Bool) -> int:
        """Most that is saved at once, bytes."""
        return max((moment.held(recomputed) for moment in self.moments), default=0)

    def step_ms(self, recomputed: Bool) -> float:
        """How long a step takes."""
        return self.keep_ms + float(np.array(self.again_ms)[recomputed].sum())

    def least(self) -> int:
        """The least memory that any arrangement takes, bytes."""
        best = self.solve(step_ms=float("inf"))
        return self.peak(best if best is not None else self.everything)

    def solve(self, *, budget: int | None = None, step_ms: float | None = None) -> Bool | None:
        """The fastest arrangement within a budget, or the smallest within a step time.

        Returns:
            One entry per module, true where it is recomputed; ``None`` where nothing fits.
        """
        import highspy  # noqa: PLC0415 - takes longer than reading a small trace

        solver = _ZeroOneProgram(highspy, self)
        if budget is not None:
            found = solver.fastest(budget)
        else:
            found = solver.smallest(step_ms if step_ms is not None else float("inf"))
        if found is None:
            return None
        if budget is not None and self.peak(found) > budget:  # by a byte, in floating point
            found = _within(self, found, budget)
        return found


def arrangements(rehearsal: Rehearsal) -> Arrangements:
    """What the rehearsal says of every arrangement; all of :data:`WAYS` were among its own.

    Differences are those of neighbouring steps, which a busy machine slows alike.
    """
    seen = {run.candidate for run in rehearsal.runs if run.backward >= 0}
    fixed = frozenset(range(len(rehearsal.candidates))) - seen
    today, keep, again = (arm_of_way(rehearsal.arms, way) for way in WAYS)
    longer = differences(keep.steps_ms, again.steps_ms)
    sure = median_interval(longer)[0] > 0
    times = _evened(rehearsal.candidates, fixed)
    whole = sum(times)
    again_ms = median(longer) if sure else max(whole, median(longer))
    share = again_ms / whole if whole > 0 else 0.0
    return Arrangements(
        candidates=rehearsal.candidates,
        moments=_moments(rehearsal, fixed),
        again_ms=tuple(share * time for time in times),
        keep_ms=median(today.steps_ms) + median(differences(today.steps_ms, keep.steps_ms)),
        fixed=fixed,
    )


def arm_of_way(arms: Sequence[ArmMeasured], way: Way) -> ArmMeasured:
    """The first of these that was measured this way."""
    return next(arm for arm in arms if arm.way == way)


def differences(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """By how much the later times are longer, neighbour by neighbour; at least one."""
    return [b - a for a, b in zip(before, after, strict=False)] or [0.0]


def _evened(candidates: Sequence[Candidate], fixed: frozenset[int]) -> list[float]:
    """Recompute times; those of one class that are about the same are the same."""
    groups: dict[str, list[list[int]]] = defaultdict(list)
    for place in sorted(range(len(candidates)), key=lambda n: candidates[n].again_ms):
        one = candidates[place]
        if place in fixed:
            continue
        alike = groups[one.module_class]
        if alike and one.again_ms <= (1 + _ALIKE) * candidates[alike[-1][0]].again_ms:
            alike[-1].append(place)
        else:
            alike.append([place])
    found = [0.0] * len(candidates)
    for group in (group for alike in groups.values() for group in alike):
        for place in group:
            found[place] = median([candidates[n].again_ms for n in group])
    return found


def _moments(rehearsal: Rehearsal, fixed: frozenset[int]) -> tuple[Moment, ...]:
    runs = rehearsal.runs
    ends = sorted({hold.end for storage in rehearsal.storages for hold in storage.holds})
    begins = sorted({hold.begin for storage in rehearsal.storages for hold in storage.holds})
    turns = {end for end in ends if _turns(end, begins, ends)}
    found: dict[tuple[tuple[frozenset[Condition], int], ...], int] = {}
    at: list[tuple[int, int]] = [(turn, -1) for turn in sorted(turns)]
    at += [
        (run.backward, place)
        for place, run in enumerate(runs)
        if run.backward >= 0 and run.candidate not in fixed
    ]
    for time, recomputing in at:
        moment = _moment(rehearsal, time, recomputing, fixed)
        found[moment.terms] = max(found.get(moment.terms, 0), moment.always)
    return tuple(Moment(always, terms) for terms, always in found.items())


def _turns(end: int, begins: Sequence[int], ends: Sequence[int]) -> bool:
    """Is this the first end behind a beginning?"""
    last_begin = begins[np.searchsorted(begins, end) - 1] if begins and begins[0] < end else -1
    place = int(np.searchsorted(ends, end))
    return last_begin >= 0 and (place == 0 or ends[place - 1] < last_begin)


def _moment(rehearsal: Rehearsal, time: int, recomputing: int, fixed: frozenset[int]) -> Moment:
    """Just before an event; ``recomputing`` is the run that is recomputed now, if it is at all."""
    runs = rehearsal.runs
    always = 0
    terms: dict[frozenset[Condition], int] = defaultdict(int)
    for storage in rehearsal.storages:
        literals: set[Condition] = set()
        held = False
        for hold in storage.holds:
            place = runs[hold.run].candidate if hold.run >= 0 else -1
            movable = place >= 0 and place not in fixed
            if hold.kind == "saved":
                there = hold.begin < time <= hold.end
                if not movable:
                    held |= there
                elif hold.run == recomputing and runs[hold.run].backward <= hold.end:
                    held = True  # made again, or kept all the time
                elif there:
                    literals.add((place, False))
            elif movable and hold.begin < time <= runs[hold.run].backward:
                literals.add((place, True))
        if held or any((place, not again) in literals for place, again in literals):
            always += storage.size
        elif literals:
            terms[frozenset(literals)] += storage.size
    return Moment(always, tuple(sorted(terms.items(), key=lambda term: sorted(term[0]))))


def _within(one: Arrangements, found: Bool, budget: int) -> Bool | None:
    """What does not fit to the byte gives way: the modules that cost least are recomputed too."""
    found = found.copy()
    for place in np.argsort(one.again_ms, kind="stable"):
        if place in one.fixed:
            continue
        found[place] = True
        if one.peak(found) <= budget:
            return found
    return None


class _ZeroOneProgram:
    """The 0-1 program: one variable a module, true where it is recomputed."""

    def __init__(self, highspy: Any, one: Arrangements) -> None:
        self._highs = highspy
        self._one = one
        solver = self._solver = highspy.Highs()
        solver.silent()
        for option, value in (
            ("mip_rel_gap", 0.0),
            ("mip_abs_gap", 0.0),
            ("time_limit", _TIME_LIMIT_S),
            ("threads", 1),
        ):
            solver.setOptionValue(option, value)
        self._again = [solver.addBinary() for _ in one.candidates]
        for place in one.fixed:
            solver.addConstr(self._again[place] <= 0)
        self._shared: dict[frozenset[Condition], Any] = {}
        self._most = solver.addVariable(lb=0.0)
        for moment in one.moments:
            held: Any = moment.always / _SCALE
            for literals, size in moment.terms:
                held = held + self._active(literals) * (size / _SCALE)
            solver.addConstr(self._most >= held)

    def _active(self, literals: frozenset[Condition]) -> Any:
        """1 where one of the conditions holds."""
        if len(literals) == 1:
            ((place, again),) = literals
            return self._again[place] if again else 1 - self._again[place]
        if literals not in self._shared:
            shared = self._solver.addVariable(lb=0.0, ub=1.0)
            for place, again in literals:
                one = self._again[place] if again else 1 - self._again[place]
                self._solver.addConstr(shared >= one)
            self._shared[literals] = shared
        return self._shared[literals]

    def fastest(self, budget: int) -> Bool | None:
        """Within a budget, bytes."""
        self._solver.addConstr(self._most <= budget / _SCALE)
        times = self._times()
        return self._minimised(times + self._most * (_PREFERENCE * self._weight()))

    def smallest(self, step_ms: float) -> Bool | None:
        """Within a step time."""
        times = self._times()
        if step_ms < float("inf"):
            self._solver.addConstr(times <= step_ms - self._one.keep_ms)
        worth = 1.0 / max(1e-9, sum(self._one.again_ms))
        return self._minimised(self._most + times * (_PREFERENCE * worth))

    def _times(self) -> Any:
        return sum(
            (x * ms for x, ms in zip(self._again, self._one.again_ms, strict=True)),
            start=0 * self._most,
        )

    def _weight(self) -> float:
        """Time for a MiB, so that all memory together counts as much as all time."""
        whole = self._one.peak(self._one.nothing) / _SCALE
        return max(1e-9, sum(self._one.again_ms)) / max(whole, 1e-9)

    def _minimised(self, objective: Any) -> Bool | None:
        self._solver.minimize(objective)
        status = self._solver.getModelStatus()
        if status == self._highs.HighsModelStatus.kInfeasible:
            return None
        values = [self._solver.val(x) for x in self._again]
        return np.array([value > 0.5 for value in values], np.bool_)
