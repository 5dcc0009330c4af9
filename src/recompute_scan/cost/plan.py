"""The plan: the best arrangement of checkpoints, from what a rehearsal measured.

A step takes as long as one without checkpoints, and the extra time of recomputing everything shared
out by the recomputes' own times, which are measured where they run; likewise for selective
checkpoints, and for parts, since each has a checkpoint to pay for. Where the steps vary too much to
show extra time, those times themselves are added. The extra time of offloading everything, if there
certainly is any, is shared out by the bytes.

Steps of several arms took turns. A machine that gets slower or faster on the way does so for
neighboring steps alike, so arms are compared pair by pair: an arm takes today's step times the
median ratio of its steps to today's steps next to them. Where an arm is what the script does today
by another way, both made the same steps, and each pair is worth its mean.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Literal

import numpy as np
from msgspec import Struct

from recompute_scan.cost.arrangement import (
    KEEP,
    OFFLOAD,
    PART,
    RECOMPUTE,
    SELECTIVE,
    TIME_LIMIT_S,
    Arrangements,
    Choices,
    moments,
)
from recompute_scan.errors import RunError, UsageError
from recompute_scan.intervals import FEWEST_PAIRS, median_interval, pair_interval
from recompute_scan.result import ActivationPlan, PlannedModule, PlanPoint, PlanProof
from recompute_scan.result.run_record import (
    ArmMeasured,
    Candidate,
    Rehearsal,
    Way,
    fixed_places,
    parts_of,
    usual_ms,
    whole_places,
)
from recompute_scan.units import ms, plural, size

# Recomputes of modules of one class that differ by less than this count as equally fast.
_ALIKE = 0.25


class ArmTimes(Struct, frozen=True):
    """Durations of a step by arrangement, ms, of those that were measured; and arrangements with
    steps that are certainly longer than without checkpoints.
    """

    ms: dict[Way, float]
    surely_longer: frozenset[Way]


def arm_of_way(arms: Sequence[ArmMeasured], way: Way) -> ArmMeasured:
    """The first of these that was measured this way."""
    return next(arm for arm in arms if arm.way == way)


def steps_together(ranks: Sequence[Rehearsal]) -> dict[Way, tuple[float, ...]]:
    """Step times by arrangement, ms: a step is over when the last rank has made it.

    Where one without checkpoints failed, it takes what one with all of them does, less what its
    recomputes take. The work of torch around these stays in it.
    """
    each: dict[Way, list[tuple[float, ...]]] = defaultdict(list)
    for one in ranks:
        for arm in one.arms:
            each[arm.way].append(arm.steps_ms)
    if "keep" not in each and "recompute" in each:
        for one, steps in zip(ranks, each["recompute"], strict=True):
            again = sum(one.candidates[n].again_ms for n in whole_places(one.candidates))
            each["keep"].append(tuple(max(0.0, ms - again) for ms in steps))
    return {way: tuple(map(max, zip(*steps, strict=False))) for way, steps in each.items()}


def arm_times(ranks: Sequence[Rehearsal]) -> ArmTimes:
    """The ranks' steps together, for the arrangements that all of them measured."""
    steps = steps_together(ranks)
    for way in ("keep", "recompute"):
        if _is_todays(ranks, way, steps):
            both = zip(steps["today"], steps[way], strict=False)
            steps["today"] = steps[way] = tuple((one + other) / 2 for one, other in both)
    today = usual_ms(steps["today"])
    each, longer = {}, set[Way]()
    for way, times in steps.items():
        pairs = zip(steps["today"], times, strict=False)
        each[way] = today * median([time / one for one, time in pairs if one > 0] or [0.0])
        pairs = zip(steps["keep"], times, strict=False)
        if median_interval([after - before for before, after in pairs] or [0.0])[0] > 0:
            longer.add(way)
    return ArmTimes(each, frozenset(longer))


def _is_todays(ranks: Sequence[Rehearsal], way: Way, steps: dict[Way, tuple[float, ...]]) -> bool:
    """Does the script checkpoint what this arrangement does?"""
    for one in ranks:
        if way not in [arm.way for arm in one.arms]:
            return False
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


def _evened(
    candidates: Sequence[Candidate], times: Sequence[float], fixed: frozenset[int]
) -> list[float]:
    """Recompute times, made equal within a class where they are about the same."""
    groups: dict[str, list[list[int]]] = defaultdict(list)
    for place in sorted(set(range(len(times))) - fixed, key=lambda n: times[n]):
        alike = groups[candidates[place].module_class]
        if not alike or times[place] > (1 + _ALIKE) * times[alike[-1][0]]:
            alike.append([])
        alike[-1].append(place)
    found = [0.0] * len(times)
    for group in itertools.chain(*groups.values()):
        for place in group:
            found[place] = median([times[n] for n in group])
    return found


# Recomputes of selective checkpoints, and of parts, have to take less than this share of whole
# ones.
_WORTH = 0.9

# The arrangements that a rehearsal measures for a plan; the last only where a device has memory of
# its own.
WAYS: tuple[Way, ...] = ("today", "keep", "recompute", "parts", "selective")
WAYS_ON_DEVICE: tuple[Way, ...] = (*WAYS, "offload")


def arrangements(*ranks: Rehearsal) -> Arrangements:
    """Time and memory of every arrangement, by the rehearsals.

    The rehearsals have today's arrangement and the one that recomputes everything; others of
    :data:`WAYS` can be missing.

    Args:
        ranks: What each rank has shown, of the same modules. Every one has to have the memory, and
            a step takes what the slowest takes.
    """
    times, fixed = arm_times(ranks), fixed_places(ranks)
    candidates = ranks[0].candidates
    modules = whole_places(candidates)
    each = list(zip(*(one.candidates for one in ranks), strict=True))

    def shared(way: Way, alone: Sequence[float]) -> tuple[float, ...]:
        """The extra time of an arm's steps, shared out by its recomputes' own times, ms: at least
        these, where the steps are not surely longer. Fixed modules have none.
        """
        others = {n for n, one in enumerate(candidates) if (one.part_of < 0) == (way == "parts")}
        even = _evened(candidates, alone, fixed | others)
        whole, longer = sum(even), times.ms[way] - times.ms["keep"]
        extra = longer if way in times.surely_longer else max(whole, longer)
        share = extra / whole if whole > 0 else 0.0
        return tuple(share * time for time in even)

    alone = [max(one.again_ms for one in same) for same in each]
    again_ms = shared("recompute", alone)
    if "parts" in times.ms:
        again_ms = tuple(map(max, again_ms, shared("parts", alone)))
    selective_ms: tuple[float | None, ...] = ()
    if "selective" in times.ms:
        partly = shared("selective", [max(one.selective_ms for one in same) for same in each])
        # It never holds less, and needs a policy.
        selective_ms = tuple(
            ms if ms < _WORTH * whole else None for ms, whole in zip(partly, again_ms, strict=True)
        )
    offload_ms = _offload_ms(ranks, times, fixed)
    choices = {KEEP, RECOMPUTE, *([OFFLOAD] if offload_ms else [])}
    if any(selective_ms[place] is not None for place in modules[: len(selective_ms)]):
        choices.add(SELECTIVE)
    parts = frozenset(
        place
        for place, one in enumerate(candidates)
        if one.part_of >= 0
        and not {place, one.part_of} & fixed
        and 0 < again_ms[place] < _WORTH * again_ms[one.part_of]
        and not any(_runs_elsewhere(rank, place) for rank in ranks)
    )
    return Arrangements(
        candidates=candidates,
        moments=moments(ranks, fixed, frozenset(choices), parts),
        again_ms=again_ms,
        keep_ms=times.ms["keep"],
        today_ms=times.ms["today"],
        fixed=fixed,
        selective_ms=selective_ms,
        offload_ms=offload_ms,
        parts=parts,
    )


def _offload_ms(
    ranks: Sequence[Rehearsal], times: ArmTimes, fixed: frozenset[int]
) -> tuple[float, ...]:
    """The time to have all that each module saves on the host; empty where it is not known.

    Where steps vary too much to say what copies take, they would come out free.
    """
    measured = all("offload" in [arm.way for arm in one.arms] for one in ranks)
    if not measured or "offload" not in times.surely_longer:
        return ()
    candidates = ranks[0].candidates
    # A copy of the tensors that the module saves, and of its weights.
    sizes = [
        max(saved_bytes(one, n) + one.candidates[n].weight_bytes for one in ranks)
        for n in range(len(candidates))
    ]
    whole = sum(sizes[n] for n in whole_places(candidates) if n not in fixed)
    longer = max(0.0, times.ms["offload"] - times.ms["keep"])
    return tuple(longer * size / max(1, whole) for size in sizes)


def _runs_elsewhere(rehearsal: Rehearsal, part: int) -> bool:
    """Does a part run outside its module too?"""
    around = [run.part_of for run in rehearsal.runs if run.candidate == part]
    module = rehearsal.candidates[part].part_of
    return any(run < 0 or rehearsal.runs[run].candidate != module for run in around)


def saved_bytes(rehearsal: Rehearsal, candidate: int) -> int:
    """Bytes that one run's operators save, each storage once; the largest run's."""
    sizes = Counter[int]()
    for storage in rehearsal.storages:
        saved = {hold.run for hold in storage.holds if hold.kind == "saved"}
        sizes.update(dict.fromkeys(saved.union(map(rehearsal.whole_run, saved)), storage.size))
    runs = (n for n, run in enumerate(rehearsal.runs) if run.candidate == candidate)
    return max((sizes[run] for run in runs), default=0)


_AMOUNT = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?)(?P<binary>i?)B?", re.I)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
# Share of the memory kept free: other programs, fragmentation, steps larger than the rehearsed one.
_RESERVE = 0.10
_CURVE_POINTS = 12
_RECOMPUTED = (RECOMPUTE, SELECTIVE)
_NEVER_RAN = (
    "The script failed in a step without checkpoints. The time shown for it is an upper bound: a "
    "step that recomputes every module, minus its recomputes."
)


class Wish(Struct, frozen=True):
    """The limit that was asked for, as it was written (``text``).

    Attributes:
        kind: ``bytes``, ``share`` (a share of today's bytes), ``free`` or ``time``.
        amount: Bytes, a share, or ms; 0 for ``free``.
    """

    kind: Literal["bytes", "share", "free", "time"]
    amount: float
    text: str

    def budget(self, today: int, free: int | None) -> int | None:
        """Bytes that may be taken; ``None`` where that is not limited, or not known.

        Today's arrangement takes so many, and others are free in addition.
        """
        if self.kind == "bytes":
            return round(self.amount)
        if self.kind == "share":
            return round(self.amount * today)
        if self.kind == "free" and free is not None:
            return today + round((1 - _RESERVE) * free)
        return None


def read_wish(memory: str | None, step_time_ms: float | None) -> Wish:
    """The limit that these options give; without either, the memory that today's takes.

    Args:
        memory: ``60GB``, ``512 MiB``, ``80%`` or ``free``.
        step_time_ms: Longest step, ms.

    Raises:
        UsageError: Both are given, or the text is not an amount of memory (``E232``).
    """
    if memory is not None and step_time_ms is not None:
        raise UsageError(
            "E232",
            "A plan takes one limit: memory or step time.",
            hint="give one; the plan's curve shows time and memory",
        )
    if step_time_ms is not None:
        return Wish("time", step_time_ms, f"--step-time {step_time_ms:g}")
    text = (memory or "100%").strip()
    said = f"--memory {text}"
    if text.lower() == "free":
        return Wish("free", 0.0, said)
    if text.endswith("%") and re.fullmatch(r"\d+(\.\d+)?", text[:-1].strip()):
        return Wish("share", float(text[:-1]) / 100, said)
    found = _AMOUNT.fullmatch(text)
    if found is None or (not found["unit"] and found["binary"]):
        raise UsageError(
            "E232",
            f"--memory {text} is no amount of memory.",
            hint="60GB, 512MiB, 80% (of today's use) or free",
        )
    base = 1024 if found["binary"] else 1000
    return Wish("bytes", float(found["number"]) * base ** _POWERS[found["unit"].upper()], said)


class Planner:
    """Plans one arrangement for all ranks, from what each has rehearsed.

    Attributes:
        arrangements: What every arrangement takes.
    """

    def __init__(self, ranks: Sequence[Rehearsal], wish: Wish) -> None:
        self._rehearsal = ranks[0]
        self.arrangements: Arrangements = arrangements(*ranks)
        self._parts = parts_of(self.arrangements.candidates)
        self._modules = list(self._parts)
        today = [arm_of_way(one.arms, "today") for one in ranks]
        step_ms = self.arrangements.today_ms
        self.today = PlanPoint(None, step_ms, max(map(taken, today)), measured=True)
        free = [one.free_bytes for one in ranks if one.free_bytes is not None]
        # Ranks on CPUs share what their host has.
        self._free = min(free) // (len(ranks) if ranks[0].device == "cpu" else 1) if free else None
        self.limit_to(wish)

    def limit_to(self, wish: Wish) -> None:
        """From here on this is the limit."""
        self._wish = wish
        self.budget = wish.budget(self.today.peak_bytes, self._free)

    def best(self, less: int = 0, limit_s: float = TIME_LIMIT_S) -> Choices:
        """The best arrangement within the limit, the budget kept by some bytes less.

        Raises:
            RunError: None keeps it (``E332``).
        """
        model, wish = self.arrangements, self._wish
        if wish.kind == "time":
            found = model.solve(step_ms=wish.amount, limit_s=limit_s)
        elif self.budget is not None:
            found = model.solve(budget=self.budget - less, limit_s=limit_s)
        else:
            raise RunError(
                "E332",
                "The free memory is unknown here.",
                hint="give an amount: --memory 8GB, or a share of today's: --memory 80%",
            )
        if found is None:
            raise self._impossible()
        return found

    def plan(self, chosen: Choices, *, curve: bool = True) -> ActivationPlan:
        """The plan with this arrangement, its setting and proof open; a curve takes seconds."""
        model = self.arrangements
        least = model.solve(step_ms=float("inf")) if curve else model.everything
        ran = any(arm.way == "keep" for arm in self._rehearsal.arms)
        worked_out = () if ran else (_NEVER_RAN,)
        return ActivationPlan(
            device="gpu" if self._rehearsal.device == "cuda" else "cpu",
            asked=self._wish.text,
            budget_bytes=self.budget,
            limit_ms=self._wish.amount if self._wish.kind == "time" else None,
            today=self.today,
            least=self.point(least),
            most=self.point(model.nothing),
            plan=self.point(chosen),
            curve=self._curve() if curve else (),
            modules=tuple(self._module(place, chosen) for place in self._modules),
            setting=(),
            code="",
            proof=PlanProof("not-tried"),
            remarks=(*_left_out(self._rehearsal), *worked_out, *self._rehearsal.remarks),
            operators=self._rehearsal.operators if (chosen == SELECTIVE).any() else (),
        )

    def point(self, choices: Choices | None) -> PlanPoint:
        """One arrangement's figures."""
        model = self.arrangements
        chosen = model.everything if choices is None else choices
        return PlanPoint(
            int(np.isin(chosen[self._modules], _RECOMPUTED).sum()),
            model.step_ms(chosen),
            model.peak(chosen),
            selective=int((chosen[self._modules] == SELECTIVE).sum()),
            offloaded=int((chosen[self._modules] == OFFLOAD).sum()),
            in_part=len(
                {model.candidates[place].part_of for place in np.flatnonzero(chosen == PART)}
            ),
        )

    def _module(self, place: int, chosen: Choices) -> PlannedModule:
        model, choice = self.arrangements, chosen[place]
        one = model.candidates[place]
        parts = self._parts[place]
        alone = [n for n in parts if chosen[n] == PART]

        def names(places: Sequence[int]) -> tuple[str, ...]:
            each = (model.candidates[n].module for n in places)
            return tuple(name.removeprefix(f"{one.module}.") for name in each)

        if alone:
            takes = sum(model.again_ms[n] for n in alone)
        else:
            takes = model.again_ms[place] if choice == KEEP else model.extra_ms(place, choice)
        return PlannedModule(
            one.module,
            one.module_class,
            one.checkpointed,
            bool(choice in _RECOMPUTED),
            takes,
            saved_bytes(self._rehearsal, place),
            bool(choice == SELECTIVE),
            bool(choice == OFFLOAD),
            names(alone),
            names([n for n in parts if model.candidates[n].checkpointed]),
        )

    def _curve(self) -> tuple[PlanPoint, ...]:
        """The fastest for their memory, each faster than the one before."""
        model = self.arrangements
        low, high = model.least(), model.peak(model.nothing)
        found: list[PlanPoint] = []
        budgets = np.linspace(low, high, _CURVE_POINTS).astype(np.int64)
        for choice in filter(lambda one: one is not None, model.solve_each(budgets.tolist())):
            point = self.point(choice)
            if not found or point.step_ms < found[-1].step_ms - 1e-9:
                found.append(point)
        return tuple(found)

    def _impossible(self) -> RunError:
        if self._wish.kind == "time":
            return RunError(
                "E332",
                f"No arrangement of checkpoints makes a step as short as {ms(self._wish.amount)}.",
                why=f"without any checkpoint one takes {ms(self.arrangements.keep_ms)}",
                hint="give a longer --step-time",
            )
        least = self.arrangements.least()
        what = "saves" if self._rehearsal.device == "cpu" else "allocates"
        return RunError(
            "E332",
            f"No arrangement of checkpoints keeps to {size(self.budget)}.",
            why=f"the one that needs least {what} {size(least)} at once ({least} bytes)",
            hint=f"give {size(least)} or more, or a smaller batch",
        )


def taken(arm: ArmMeasured) -> int:
    """Most that was allocated at once on a GPU, or saved, bytes."""
    return (arm.saved_bytes if arm.allocated_bytes is None else arm.allocated_bytes) or 0


def _left_out(rehearsal: Rehearsal) -> tuple[str, ...]:
    """A sentence where only some of the modules are checkpointed today: what the others save."""
    lists: dict[str, set[int]] = defaultdict(set)
    modules = whole_places(rehearsal.candidates)
    on = {place for place in modules if rehearsal.candidates[place].checkpointed}
    on |= {one.part_of for one in rehearsal.candidates if one.checkpointed} - {-1}
    if not 0 < len(on) < len(modules):
        return ()
    for place in [place for place in modules if place not in on]:
        name = rehearsal.candidates[place].module
        lists[name.rpartition(".")[0] or name].add(place)
    said = []
    for name, places in lists.items():
        runs = {n for n, run in enumerate(rehearsal.runs) if run.candidate in places}
        saved = 0
        for storage in rehearsal.storages:
            holds = (one for one in storage.holds if one.kind == "saved")
            saved += storage.size * any(rehearsal.whole_run(one.run) in runs for one in holds)
        said.append(f"{len(places)} in {name}, which save {size(saved)}")
    return (
        f"{len(on)} of {plural(len(modules), 'module')} are checkpointed today. Not checkpointed: "
        f"{'; '.join(said)}.",
    )
