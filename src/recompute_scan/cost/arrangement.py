"""Arrangements of checkpoints under a memory budget, as a 0-1 program.

Each moment that can be the fullest gives one linear constraint, with a helper variable for every
set of modules that share a storage. HiGHS solves it (``docs/decisions/0005-memory-plan.md``).

Measured steps give the time of each choice (``cost/plan.py``).

The bytes held at a moment are a sum over storages, each counted once whatever holds it. An operator
inside a module holds the tensors that it saves unless the module is recomputed. A checkpoint holds
the module's inputs, and while its recompute is used all tensors that the module saves. A selective
one also holds the results of heavy operators, each until its recompute has come to it. An offloaded
module has its saved tensors on the host until its backward pass, weights included. There all of
them count as back at once, and in addition to other holds of the same storages: operators fetch
them one by one, as copies, so it is hardly ever more. A part with a separate checkpoint is a
checkpoint inside a module that is kept. Moments that can be the fullest are each recompute, of a
module or a part, at its end and where a selective one is the fullest, and each turn from forward to
backward.
"""

from __future__ import annotations

import itertools
import operator
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from recompute_scan.result.run_record import Candidate, Hold, Rehearsal, parts_of
from recompute_scan.terminal import without_lines

# The choice for each module: one of the first four. A part has the choice of its module, or is
# recomputed alone.
Choices = npt.NDArray[np.int8]
KEEP, RECOMPUTE, SELECTIVE, OFFLOAD, PART = 0, 1, 2, 3, 4
# A module, by its place, and what happens to it.
Condition = tuple[int, int]


class Moment(Struct, frozen=True):
    """The bytes held at one moment: ``always``, whatever is recomputed, and the bytes of each of
    the ``terms`` where one of its conditions is true.
    """

    always: int
    terms: tuple[tuple[frozenset[Condition], int], ...]

    def held(self, choices: Choices) -> int:
        """Bytes with these choices."""
        return self.always + sum(
            size
            for literals, size in self.terms
            if any(choices[place] == choice for place, choice in literals)
        )

    def more(self, size: int, where: frozenset[Condition] = frozenset()) -> Moment:
        """The same with bytes on top, where one of the conditions holds."""
        if not where:
            return Moment(self.always + size, self.terms)
        return Moment(self.always, (*self.terms, (where, max(0, size))) if size else self.terms)


def moments(
    ranks: Sequence[Rehearsal],
    fixed: frozenset[int],
    choices: frozenset[int],
    parts: frozenset[int] = frozenset(),
) -> tuple[Moment, ...]:
    """The different ones of all ranks; of those that hold the same, the fullest.

    Args:
        ranks: What each rank has shown.
        fixed: Modules that are kept whatever is chosen.
        choices: What can be chosen for any other.
        parts: Places of the parts that can be recomputed alone.
    """
    found: dict[tuple[tuple[frozenset[Condition], int], ...], int] = {}
    for rehearsal in ranks:
        lasting = [_Lasting.of(storage.holds, rehearsal) for storage in rehearsal.storages]
        for moment in _Moments(rehearsal, fixed, choices, parts, lasting).each():
            found[moment.terms] = max(found.get(moment.terms, 0), moment.always)
    return tuple(Moment(always, terms) for terms, always in found.items())


class _Lasting(Struct, frozen=True):
    """When the conditions that make one storage last change; other moments share an answer.

    Attributes:
        runs: Runs that have other conditions while they are recomputed.
        times: Events behind which they change, in order.
        known: Found conditions by how many of the times have passed.
    """

    runs: frozenset[int]
    times: list[int]
    known: dict[int, frozenset[Condition] | None]

    @classmethod
    def of(cls, holds: Sequence[Hold], rehearsal: Rehearsal) -> _Lasting:
        """From all holds of the storage."""
        runs = {run for one in holds for run in (one.run, rehearsal.whole_run(one.run)) if run >= 0}
        times = {time for one in holds for time in (one.begin, one.end)}
        return cls(
            frozenset(runs), sorted(times | {rehearsal.runs[run].backward for run in runs}), {}
        )


class _Moments(Struct, frozen=True):
    """The moments of one rank; its fields are the arguments of :func:`moments`, and each storage's
    changes.
    """

    rehearsal: Rehearsal
    fixed: frozenset[int]
    choices: frozenset[int]
    parts: frozenset[int]
    lasting: list[_Lasting]

    def each(self) -> Iterator[Moment]:
        """Those that can be the fullest."""

        def beside(moment: Moment, time: int) -> int:
            """Other bytes than saved ones until then, with everything recomputed."""
            return levels[time - 1] - moment.held(everything) if levels else 0

        runs, levels = self.rehearsal.runs, self.rehearsal.levels
        within = _within_runs(self.rehearsal)
        everything = np.full(len(self.rehearsal.candidates), RECOMPUTE, np.int8)
        everything[list(self.fixed)] = KEEP
        whole = [place for place, run in enumerate(runs) if run.part_of < 0 <= run.backward]
        moved = {runs[n].backward: n for n in whole if runs[n].candidate not in self.fixed}
        since = {0: -1, **{run.begin: -1 for run in runs}, **moved}
        for time in self.rehearsal.fullest or _turns(self.rehearsal):
            place = since[max(begin for begin in since if begin <= time)]
            moment = self._at(time, place, within[place][-1] if place >= 0 else -1)
            yield moment.more(beside(moment, time))
        again = self.choices & {RECOMPUTE, SELECTIVE}
        for time, place in moved.items():
            # The recompute has ended with the event before.
            more = beside(self._at(time, place, within[place][-1]), time - 1)
            mine = frozenset((runs[place].candidate, how) for how in again)
            for until in within[place] if SELECTIVE in again else within[place][-1:]:
                yield self._at(time, place, until).more(more, mine)
        for place, run in enumerate(runs):
            if run.backward >= 0 and run.candidate in self.parts:
                around = self._at(run.backward, run.part_of, within[run.part_of][-1])
                moment = self._at(run.backward, place, run.backward)
                yield moment.more(beside(around, run.backward))

    def _at(self, time: int, recomputing: int, until: int) -> Moment:
        """Just before an event.

        Args:
            time: The event.
            recomputing: The run that is recomputed now; -1 for none.
            until: How far it has come: the event of its forward that was made again last.
        """
        runs, candidates = self.rehearsal.runs, self.rehearsal.candidates
        offloading = OFFLOAD in self.choices and recomputing >= 0 > runs[recomputing].part_of
        copies = candidates[runs[recomputing].candidate].weight_bytes if offloading else 0
        always = 0
        terms: dict[frozenset[Condition], int] = defaultdict(int)
        for storage, lasting in zip(self.rehearsal.storages, self.lasting, strict=True):
            if recomputing not in lasting.runs:
                passed = bisect_left(lasting.times, time)
                if passed not in lasting.known:
                    lasting.known[passed] = self._conditions(storage.holds, time, -1, -1)
                literals = lasting.known[passed]
            else:
                literals = self._conditions(storage.holds, time, recomputing, until)
            if literals is None:
                always += storage.size
            elif literals:
                terms[literals] += storage.size
            if offloading and recomputing in lasting.runs:
                saved = [hold for hold in storage.holds if hold.kind == "saved"]
                whole = self.rehearsal.whole_run
                own = [recomputing in (hold.run, whole(hold.run)) for hold in saved]
                there = [hold.begin < time <= hold.end for hold in saved]
                both = any(own) and any(map(operator.gt, there, own))
                copies += storage.size * both
        if copies:
            terms[frozenset({(runs[recomputing].candidate, OFFLOAD)})] += copies
        return Moment(always, tuple(sorted(terms.items(), key=lambda term: sorted(term[0]))))

    def _conditions(
        self, holds: Sequence[Hold], time: int, recomputing: int, until: int
    ) -> frozenset[Condition] | None:
        """Conditions that each make the storage last; ``None`` where it lasts whatever is chosen.

        Takes the arguments of :meth:`_at`.
        """
        each = [self._held_by(hold, time, recomputing, until) for hold in holds]
        literals = frozenset[Condition]().union(*filter(None, each))
        every = {
            place: {(place, c) for c in self.choices | ({PART} if place in self.parts else set())}
            for place, _ in literals
        }
        always = None in each or any(all_of <= literals for all_of in every.values())
        return None if always else literals

    def _held_by(
        self, hold: Hold, time: int, recomputing: int, until: int
    ) -> set[Condition] | None:
        """The same for one hold."""
        runs, choices, run = self.rehearsal.runs, self.choices, self.rehearsal.whole_run(hold.run)
        place = runs[run].candidate if run >= 0 else -1
        # The choice for a part counts, where it has one.
        part = runs[hold.run].candidate if hold.run >= 0 else -1
        part = part if part in self.parts else place
        movable = place >= 0 and place not in self.fixed
        there = hold.begin < time <= hold.end
        if hold.kind == "local" or (hold.kind == "saved" and not movable):
            return None if there else set()
        if hold.kind == "saved":
            mine = recomputing >= 0 and recomputing in (run, hold.run)
            if not (mine and time <= hold.end and hold.begin <= until):
                return {(part, KEEP)} if there else set()
            # Made again by now, or kept all the time.
            if runs[recomputing].part_of >= 0:
                return {(part, KEEP), (part, PART)}
            inside = part != place and time <= runs[hold.run].backward
            return {(part, choice) for choice in choices} if inside else None
        if not movable:
            return set()
        if hold.kind == "input" and hold.run != run:
            asked = part in self.parts and hold.begin < time <= runs[hold.run].backward
            return {(part, PART)} if asked else set()
        if hold.kind == "heavy" and run == recomputing:
            # Results ahead of the recompute stay as long as the checkpoint.
            return {(place, SELECTIVE)} if SELECTIVE in choices and hold.begin > until else set()
        if not hold.begin < time <= runs[run].backward:
            return set()
        both = {RECOMPUTE, SELECTIVE} if hold.kind == "input" else {SELECTIVE}
        return {(place, choice) for choice in choices & both}


def _turns(rehearsal: Rehearsal) -> list[int]:
    """The first ends behind beginnings."""
    saved = [one for storage in rehearsal.storages for one in storage.holds if one.kind != "local"]
    events = sorted({(one.begin, False) for one in saved} | {(one.end, True) for one in saved})
    return [time for (_, before), (time, ends) in itertools.pairwise(events) if ends > before]


def _within_runs(rehearsal: Rehearsal) -> list[list[int]]:
    """How far the recompute of each run has come where most is there: at its end, and before it
    where a selective checkpoint still holds results that the recompute drops later.
    """
    events: list[list[tuple[int, int, int]]] = [[] for _ in rehearsal.runs]
    for storage in rehearsal.storages:
        begins: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for hold in storage.holds:
            begins[rehearsal.whole_run(hold.run)][hold.kind].append(hold.begin)
        for run, of_kind in begins.items():
            saved = min(of_kind["saved"], default=-1)
            heavy = max(of_kind["heavy"], default=-1)
            if run >= 0 and max(saved, heavy) >= 0:
                events[run].append((storage.size, saved, heavy))
    found = []
    for each in events:
        ends = sorted(made for _, made, _ in each if made >= 0)
        held = [
            sum(size for size, made, kept in each if 0 <= made <= end or kept > end) for end in ends
        ]
        fullest = [ends[held.index(max(held))]] if held and max(held) > held[-1] else []
        found.append([*fullest, *(ends[-1:] or [-1])])
    return found


# From 1.16 on the first solver of a process prints these, before anyone can say that it is not to.
_BANNER = re.compile(rb"Running HiGHS |Includes third-party software components|Copyright \(c\)")


def silent_solver(time_limit_s: float) -> tuple[ModuleType, Any]:
    """The module, and a new ``Highs`` of it."""
    import highspy  # noqa: PLC0415 - takes longer than reading a small trace

    with without_lines(1, _BANNER):
        solver = highspy.Highs()
    solver.silent()
    for option, value in (
        ("mip_rel_gap", 0.0),
        ("mip_abs_gap", 0.0),
        ("time_limit", time_limit_s),
        ("threads", 1),
    ):
        solver.setOptionValue(option, value)
    return highspy, solver


# For all solutions that are asked for together, and for each of them at least. Where layers are
# alike, what is found within a second stays, and the rest goes into proving it: of the 32 layers of
# Llama-2-7B, 2.5 s give steps within 0.02 % of the steps that 10 s give.
TIME_LIMIT_S, _LEAST_S = 10.0, 2.5
# The solver gets MiB, so that its coefficients are of one size.
_SCALE = 2.0**20
# A solution can exceed a budget by a byte, in floating point: then it gets less.
_MOST_OVER = 2**10
# Among arrangements that are as fast the one that holds less is preferred, by so little of a step
# for all memory together.
_PREFERENCE = 1e-6


class Arrangements(Struct, frozen=True):
    """All arrangements of checkpoints of one step, with what they take.

    Attributes:
        candidates: The modules, then their parts.
        moments: When it may be fullest.
        again_ms: What the recompute of each module takes of a step, ms.
        keep_ms: A step with nothing recomputed, ms.
        today_ms: A step of the script as it is, ms.
        fixed: Modules that cannot be recomputed, because no backward pass was seen of them.
        selective_ms: What a selective checkpoint takes; ``None`` where it would hardly be faster
            than one that keeps nothing, or was not measured.
        offload_ms: Time to have all that a module saves on the host; empty where that was not
            measured, or is within the noise.
        parts: Parts that can be recomputed alone.
    """

    candidates: tuple[Candidate, ...]
    moments: tuple[Moment, ...]
    again_ms: tuple[float, ...]
    keep_ms: float
    today_ms: float
    fixed: frozenset[int] = frozenset()
    selective_ms: tuple[float | None, ...] = ()
    offload_ms: tuple[float, ...] = ()
    parts: frozenset[int] = frozenset()

    @property
    def nothing(self) -> Choices:
        """Nothing is recomputed."""
        return np.zeros(len(self.candidates), np.int8)

    @property
    def everything(self) -> Choices:
        """Everything is that can be."""
        free = [n not in self.fixed for n in range(len(self.candidates))]
        return self.followed(np.array(free, np.int8))

    def followed(self, choices: Choices) -> Choices:
        """The same, with that happening to each part which happens to its module."""
        found: Choices = choices.copy()
        for place, one in enumerate(self.candidates):
            if one.part_of >= 0 and (found[one.part_of] != KEEP or found[place] != PART):
                found[place] = found[one.part_of]
        return found

    def options(self, place: int) -> tuple[int, ...]:
        """The choices for a module; for a part, where its module is kept."""
        if self.candidates[place].part_of >= 0:
            return (KEEP, PART) if place in self.parts else (KEEP,)
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
        """Time that a choice for one module adds to a step."""
        if choice == KEEP or (choice != PART and self.candidates[place].part_of >= 0):
            return 0.0
        if choice == OFFLOAD:
            return self.offload_ms[place]
        known = self.selective_ms[place] if choice == SELECTIVE else self.again_ms[place]
        assert known is not None, "one of the options"
        return known

    def least(self) -> int:
        """The least memory that any arrangement takes, bytes."""
        best = self.solve(step_ms=float("inf"))
        return self.peak(best if best is not None else self.everything)

    def solve(
        self,
        *,
        budget: int | None = None,
        step_ms: float | None = None,
        limit_s: float = TIME_LIMIT_S,
    ) -> Choices | None:
        """The fastest arrangement within a budget, or the smallest within a step time.

        That is the best one so far after the limit in seconds; ``None`` where nothing fits.
        """
        if budget is not None:
            return self.solve_each((budget,), limit_s)[0]
        program = _ZeroOneProgram(self, limit_s)
        found = program.smallest(step_ms if step_ms is not None else float("inf"))
        return None if found is None else _in_order(self, found, self.peak(found))

    def solve_each(
        self, budgets: Sequence[int], limit_s: float = TIME_LIMIT_S
    ) -> list[Choices | None]:
        """The fastest arrangement within each of these budgets, as :meth:`solve` gives it."""
        # To make it takes longer than most solutions.
        least = min(_LEAST_S, limit_s)
        program = _ZeroOneProgram(self, max(least, limit_s / max(1, len(budgets))))
        each: list[Choices | None] = []
        for budget in budgets:
            tried = map(program.fastest, (budget, budget - _MOST_OVER))
            found = next((one for one in tried if one is None or self.peak(one) <= budget), None)
            each.append(None if found is None else _in_order(self, found, budget))
        return each


def _in_order(one: Arrangements, found: Choices, budget: int) -> Choices:
    """The same with neighbours alike, where layers of one kind can change places.

    Among those the solver takes any; a setting is shorter that names the first three.
    """
    kinds: dict[object, list[list[int]]] = {}
    for whole, parts in parts_of(one.candidates).items():
        places = [whole, *parts]
        kind = [
            (one.candidates[n].module_class, *(one.extra_ms(n, c) for c in one.options(n)))
            for n in places
        ]
        kinds.setdefault(tuple(kind), []).append(places)
    for layers in kinds.values():
        done = sorted((found[places].tolist() for places in layers), reverse=True)
        for order in (done, done[::-1]):
            tried = found.copy()
            tried[np.concatenate(layers)] = np.concatenate(order)
            if one.peak(tried) <= budget:
                found = tried
                break
    return found


class _ZeroOneProgram:
    """The 0-1 program: one variable for each module, or part, and each choice but keeping."""

    def __init__(self, one: Arrangements, limit_s: float) -> None:
        self._one = one
        self._highs, solver = silent_solver(limit_s)
        self._solver = solver
        self._chosen: dict[Condition, Any] = {}
        self._kept: list[Any] = []
        for place in range(len(one.candidates)):
            mine = {(place, c): solver.addBinary() for c in one.options(place) if c != KEEP}
            self._chosen |= mine
            part_of = one.candidates[place].part_of
            self._kept.append((1 if part_of < 0 else self._kept[part_of]) - sum(mine.values()))
            if len(mine) > 1 or (mine and part_of >= 0):
                solver.addConstr(self._kept[place] >= 0)
        self._shared: dict[frozenset[Condition], Any] = {}
        self._most = solver.addVariable(lb=0.0)
        for moment in one.moments:
            held: Any = moment.always / _SCALE
            for literals, held_bytes in moment.terms:
                held = held + self._active(literals) * (held_bytes / _SCALE)
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
        if choice == KEEP:
            return self._kept[place]
        part_of = self._one.candidates[place].part_of
        decides = place if part_of < 0 or choice == PART else part_of
        return self._chosen.get((decides, choice), 0.0)

    def fastest(self, budget: int) -> Choices | None:
        """Within a budget, bytes. It can be asked for one after the other."""
        self._solver.changeColBounds(self._most.index, 0.0, budget / _SCALE)
        # Time for a MiB, so that all memory together counts as much as all time.
        whole = self._one.peak(self._one.nothing) / _SCALE
        weight = max(1e-9, sum(self._one.again_ms)) / max(whole, 1e-9)
        return self._minimised(self._times() + self._most * (_PREFERENCE * weight))

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

    def _minimised(self, objective: Any) -> Choices | None:
        self._solver.minimize(objective)
        status = self._solver.getModelStatus()
        if status == self._highs.HighsModelStatus.kInfeasible:
            return None
        found = self._one.nothing
        for (place, choice), x in self._chosen.items():
            if self._solver.val(x) > 0.5:
                found[place] = choice
        return self._one.followed(found)
