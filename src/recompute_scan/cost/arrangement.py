"""Which modules to recompute: the least time for the memory that there is, or the other way round.

Each moment that can be the fullest (``cost/moments.py``) gives one linear constraint, with a helper
variable for every set of modules that share a storage. HiGHS solves it
(``docs/decisions/memory-plan.md``).

A step takes what one without checkpoints takes (``cost/arm_times.py``), and what recomputing
everything takes more, shared out by the recomputes' own times, which are measured where they run;
likewise for selective ones. Where the steps vary too much to say that they take more, those times
themselves are added. What offloading everything takes more, if it does for certain, is shared out
by the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from recompute_scan.cost.arm_times import arm_times, shared_out
from recompute_scan.cost.moments import (
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    SELECTIVE,
    Choices,
    Condition,
    Moment,
    moments,
)
from recompute_scan.rehearsal import Candidate, Rehearsal, Way, fixed_places

_TIME_LIMIT_S = 10.0
# The solver gets MiB, so that its coefficients are of one size.
_SCALE = 2.0**20
# Among arrangements that are as fast the one that holds less is preferred, by so little of a step
# for all memory together.
_PREFERENCE = 1e-6
# Recomputes of selective checkpoints have to take less than this share of whole ones.
_WORTH = 0.9

# The arrangements that a rehearsal measures for a plan; the last only where a device has memory of
# its own.
WAYS: tuple[Way, ...] = ("today", "keep", "recompute", "selective")
WAYS_ON_DEVICE: tuple[Way, ...] = (*WAYS, "offload")


class Arrangements(Struct, frozen=True):
    """All arrangements of checkpoints of one step, with what they take.

    Attributes:
        candidates: The modules.
        moments: When it may be fullest.
        again_ms: What the recompute of each module takes of a step, ms.
        keep_ms: A step with nothing recomputed, ms.
        today_ms: A step of the script as it is, ms.
        fixed: Modules that cannot be recomputed, because no backward pass was seen of them.
        selective_ms: What a selective checkpoint takes; ``None`` where it would hardly be faster
            than one that keeps nothing, or was not measured.
        offload_ms: What it takes to have all that a module saves on the host; empty where that was
            not measured, or not told from noise.
    """

    candidates: tuple[Candidate, ...]
    moments: tuple[Moment, ...]
    again_ms: tuple[float, ...]
    keep_ms: float
    today_ms: float
    fixed: frozenset[int] = frozenset()
    selective_ms: tuple[float | None, ...] = ()
    offload_ms: tuple[float, ...] = ()

    @property
    def nothing(self) -> Choices:
        """Nothing is recomputed."""
        return np.zeros(len(self.candidates), np.int8)

    @property
    def everything(self) -> Choices:
        """Everything is that can be."""
        return np.array([n not in self.fixed for n in range(len(self.candidates))], np.int8)

    def options(self, place: int) -> tuple[int, ...]:
        """What can be chosen for a module."""
        if place in self.fixed:
            return (KEEP,)
        known = self.selective_ms[place] if self.selective_ms else None
        found = (KEEP, RECOMPUTE) if known is None else (KEEP, RECOMPUTE, SELECTIVE)
        return (*found, OFFLOAD) if self.offload_ms else found

    def peak(self, choices: Choices) -> int:
        """Most that is saved at once, bytes."""
        return max((moment.held(choices) for moment in self.moments), default=0)

    def step_ms(self, choices: Choices) -> float:
        """How long a step takes."""
        return self.keep_ms + sum(self.extra_ms(n, choice) for n, choice in enumerate(choices))

    def extra_ms(self, place: int, choice: int) -> float:
        """What a choice for one module adds to a step."""
        if choice == SELECTIVE:
            known = self.selective_ms[place]
            assert known is not None, "one of the options"
            return known
        if choice == OFFLOAD:
            return self.offload_ms[place]
        return self.again_ms[place] if choice == RECOMPUTE else 0.0

    def least(self) -> int:
        """The least memory that any arrangement takes, bytes."""
        best = self.solve(step_ms=float("inf"))
        return self.peak(best if best is not None else self.everything)

    def solve(self, *, budget: int | None = None, step_ms: float | None = None) -> Choices | None:
        """The fastest arrangement within a budget, or the smallest within a step time.

        Returns:
            One entry per module; ``None`` where nothing fits.
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


def arrangements(*ranks: Rehearsal) -> Arrangements:
    """What the rehearsals say of every arrangement; all of :data:`WAYS` were among their own, but
    for selective checkpoints, which can be missing.

    Args:
        ranks: What each rank has shown, of the same modules. Every one has to have the memory, and
            a step takes what the slowest takes.
    """
    times, fixed = arm_times(ranks), fixed_places(ranks)
    candidates = ranks[0].candidates
    each = list(zip(*(one.candidates for one in ranks), strict=True))

    def shared(way: Way, alone: Sequence[float]) -> tuple[float, ...]:
        longer = times.ms[way] - times.ms["keep"]
        return shared_out(longer, candidates, alone, fixed, sure=way in times.surely_longer)

    again_ms = shared("recompute", [max(one.again_ms for one in same) for same in each])
    selective_ms: tuple[float | None, ...] = ()
    if "selective" in times.ms:
        partly = shared("selective", [max(one.selective_ms for one in same) for same in each])
        # It never holds less, and needs a policy.
        selective_ms = tuple(
            ms if ms < _WORTH * whole else None for ms, whole in zip(partly, again_ms, strict=True)
        )
    choices = {KEEP, RECOMPUTE}
    if any(ms is not None for ms in selective_ms):
        choices.add(SELECTIVE)
    offload_ms: tuple[float, ...] = ()
    # Where steps vary too much to say what copies take, they would come out free.
    measured = all(any(arm.way == "offload" for arm in one.arms) for one in ranks)
    if measured and "offload" in times.surely_longer:
        choices.add(OFFLOAD)
        sizes = [max(_copied_bytes(one, n) for one in ranks) for n in range(len(candidates))]
        whole = sum(size for n, size in enumerate(sizes) if n not in fixed)
        longer = max(0.0, times.ms["offload"] - times.ms["keep"])
        offload_ms = tuple(longer * size / max(1, whole) for size in sizes)
    return Arrangements(
        candidates=candidates,
        moments=moments(ranks, fixed, frozenset(choices)),
        again_ms=again_ms,
        keep_ms=times.ms["keep"],
        today_ms=times.ms["today"],
        fixed=fixed,
        selective_ms=selective_ms,
        offload_ms=offload_ms,
    )


def _copied_bytes(rehearsal: Rehearsal, candidate: int) -> int:
    """Bytes that offloading a module copies, about: what it saves, and its weights."""
    return saved_bytes(rehearsal, candidate) + rehearsal.candidates[candidate].weight_bytes


def saved_bytes(rehearsal: Rehearsal, candidate: int) -> int:
    """Bytes that one run's operators save, each storage once; the largest run's."""
    sizes: dict[int, int] = {}
    for storage in rehearsal.storages:
        for run in {hold.run for hold in storage.holds if hold.kind == "saved"}:
            sizes[run] = sizes.get(run, 0) + storage.size
    runs = (n for n, run in enumerate(rehearsal.runs) if run.candidate == candidate)
    return max((sizes.get(run, 0) for run in runs), default=0)


def _within(one: Arrangements, found: Choices, budget: int) -> Choices | None:
    """What does not fit to the byte gives way: the modules that cost least are recomputed too."""
    found = found.copy()
    for place in np.argsort(one.again_ms, kind="stable"):
        if place in one.fixed:
            continue
        found[place] = RECOMPUTE
        if one.peak(found) <= budget:
            return found
    return None


class _ZeroOneProgram:
    """The 0-1 program: one variable for each module and each choice but keeping."""

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
        self._chosen: dict[Condition, Any] = {}
        self._kept: list[Any] = []
        for place in range(len(one.candidates)):
            mine = {(place, c): solver.addBinary() for c in one.options(place) if c != KEEP}
            self._chosen |= mine
            self._kept.append(1 - sum(mine.values()))
            if len(mine) > 1:
                solver.addConstr(self._kept[place] >= 0)
        self._shared: dict[frozenset[Condition], Any] = {}
        self._most = solver.addVariable(lb=0.0)
        for moment in one.moments:
            held: Any = moment.always / _SCALE
            for literals, size in moment.terms:
                held = held + self._active(literals) * (size / _SCALE)
            solver.addConstr(self._most >= held)

    def _active(self, literals: frozenset[Condition]) -> Any:
        """1 where one of the conditions holds."""
        each: dict[int, Any] = {}
        for place, choice in sorted(literals):  # of one module's no two hold at once
            each[place] = each.get(place, 0.0) + self._holds(place, choice)
        sums = list(each.values())
        if len(sums) == 1:
            return sums[0]
        if literals not in self._shared:
            shared = self._solver.addVariable(lb=0.0, ub=1.0)
            for one in sums:
                self._solver.addConstr(shared >= one)
            self._shared[literals] = shared
        return self._shared[literals]

    def _holds(self, place: int, choice: int) -> Any:
        """1 where this is chosen for the module."""
        return self._kept[place] if choice == KEEP else self._chosen.get((place, choice), 0.0)

    def fastest(self, budget: int) -> Choices | None:
        """Within a budget, bytes."""
        self._solver.addConstr(self._most <= budget / _SCALE)
        times = self._times()
        return self._minimised(times + self._most * (_PREFERENCE * self._weight()))

    def smallest(self, step_ms: float) -> Choices | None:
        """Within a step time."""
        times = self._times()
        if step_ms < float("inf"):
            self._solver.addConstr(times <= step_ms - self._one.keep_ms)
        worth = 1.0 / max(1e-9, sum(self._one.again_ms))
        return self._minimised(self._most + times * (_PREFERENCE * worth))

    def _times(self) -> Any:
        return sum(
            (x * self._one.extra_ms(*condition) for condition, x in self._chosen.items()),
            start=0 * self._most,
        )

    def _weight(self) -> float:
        """Time for a MiB, so that all memory together counts as much as all time."""
        whole = self._one.peak(self._one.nothing) / _SCALE
        return max(1e-9, sum(self._one.again_ms)) / max(whole, 1e-9)

    def _minimised(self, objective: Any) -> Choices | None:
        self._solver.minimize(objective)
        status = self._solver.getModelStatus()
        if status == self._highs.HighsModelStatus.kInfeasible:
            return None
        found = self._one.nothing
        for (place, choice), x in self._chosen.items():
            if self._solver.val(x) > 0.5:
                found[place] = choice
        return found
