"""The plan for a step that was rehearsed, as the result has it, and what it is to keep to."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import numpy as np
from msgspec import Struct

from recompute_scan.cost.arm_times import arm_of_way
from recompute_scan.cost.arrangement import Arrangements
from recompute_scan.cost.moments import KEEP, OFFLOAD, PART, RECOMPUTE, SELECTIVE, Choices
from recompute_scan.cost.rehearsed import arrangements, saved_bytes
from recompute_scan.errors import RunError, UsageError
from recompute_scan.rehearsal import ArmMeasured, Rehearsal, parts_of, whole_places
from recompute_scan.result import ActivationPlan, PlannedModule, PlanPoint, PlanProof
from recompute_scan.units import ms, plural, size

_AMOUNT = re.compile(
    r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]?)(?P<binary>i?)B?", re.IGNORECASE
)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
# Kept free of what is there: other programs, fragmentation, steps larger than the rehearsed one.
_RESERVE = 0.10
_CURVE_POINTS = 12
_RECOMPUTED = (RECOMPUTE, SELECTIVE)


class Wish(Struct, frozen=True):
    """The limit that was asked for.

    Attributes:
        kind: ``bytes``, ``share`` (of what today's arrangement takes), ``free`` or ``time``.
        amount: Bytes, a share, or ms; 0 for ``free``.
        text: As it was written.
    """

    kind: Literal["bytes", "share", "free", "time"]
    amount: float
    text: str

    def budget(self, today: int, free: int | None) -> int | None:
        """Bytes that may be taken; ``None`` where that is not limited, or not known.

        Args:
            today: What today's arrangement takes.
            free: What is free beside it.
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
        UsageError: Both are given, or the text is none of these (``E232``).
    """
    if memory is not None and step_time_ms is not None:
        raise UsageError(
            "E232",
            "A plan keeps to one limit: --memory or --step-time.",
            hint="leave one of them out; the curve shows the other",
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
            hint="60GB, 512MiB, 80% (of what it takes today) or free",
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
        self._wish = wish
        self.arrangements: Arrangements = arrangements(*ranks)
        self._parts = parts_of(self.arrangements.candidates)
        self._modules = list(self._parts)
        saved = self.arrangements.peak(self.arrangements.everything)
        again = [arm_of_way(one.arms, "recompute").allocated_bytes for one in ranks]
        #: What is allocated on a GPU beside what is saved; nothing on a CPU, where it is unknown.
        self._beside = max([0, *(bytes_ - saved for bytes_ in again if bytes_ is not None)])
        today = [arm_of_way(one.arms, "today") for one in ranks]
        step_ms = self.arrangements.today_ms
        self.today = PlanPoint(None, step_ms, max(map(taken, today)), measured=True)
        free = [one.free_bytes for one in ranks if one.free_bytes is not None]
        # Ranks on CPUs share what their host has.
        each = min(free) // (len(ranks) if ranks[0].device == "cpu" else 1) if free else None
        self.budget = wish.budget(self.today.peak_bytes, each)

    def best(self, less: int = 0) -> Choices:
        """The best arrangement within the limit.

        Args:
            less: Bytes by which the budget is to be kept.

        Raises:
            RunError: None keeps it (``E332``).
        """
        model, wish = self.arrangements, self._wish
        if wish.kind == "time":
            found = model.solve(step_ms=wish.amount)
        elif self.budget is not None:
            found = model.solve(budget=self.budget - less - self._beside)
        else:
            raise RunError(
                "E332",
                "How much memory is free is not known here.",
                hint="give an amount: --memory 8GB, or a share of today's: --memory 80%",
            )
        if found is None:
            raise self._impossible()
        return found

    def plan(self, chosen: Choices) -> ActivationPlan:
        """The plan with this arrangement, its setting and proof still open."""
        model = self.arrangements
        return ActivationPlan(
            device="gpu" if self._rehearsal.device == "cuda" else "cpu",
            asked=self._wish.text,
            budget_bytes=self.budget,
            limit_ms=self._wish.amount if self._wish.kind == "time" else None,
            today=self.today,
            least=self.point(model.solve(step_ms=float("inf"))),
            most=self.point(model.nothing),
            plan=self.point(chosen),
            curve=self._curve(),
            modules=tuple(self._module(place, chosen) for place in self._modules),
            setting=(),
            code="",
            proof=PlanProof("not-tried"),
            remarks=(*_left_out(self._rehearsal), *self._rehearsal.remarks),
            operators=self._rehearsal.operators if (chosen == SELECTIVE).any() else (),
        )

    def point(self, choices: Choices | None) -> PlanPoint:
        """One arrangement's figures."""
        model = self.arrangements
        chosen = model.everything if choices is None else choices
        return PlanPoint(
            int(np.isin(chosen[self._modules], _RECOMPUTED).sum()),
            model.step_ms(chosen),
            model.peak(chosen) + self._beside,
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
        for choice in model.solve_each(budgets.tolist()):
            if choice is None:
                continue
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
        least = self.arrangements.least() + self._beside
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
    for place in modules:
        if place not in on:
            name = rehearsal.candidates[place].module
            lists[name.rpartition(".")[0] or name].add(place)
    if not 0 < len(on) < len(modules):
        return ()
    said = []
    for name, places in lists.items():
        runs = {n for n, run in enumerate(rehearsal.runs) if run.candidate in places}
        saved = sum(
            storage.size
            for storage in rehearsal.storages
            if any(
                hold.kind == "saved" and rehearsal.whole_run(hold.run) in runs
                for hold in storage.holds
            )
        )
        said.append(f"{len(places)} in {name}, which save {size(saved)}")
    others = "; ".join(said)
    return (
        f"{len(on)} of {plural(len(modules), 'module')} are checkpointed today. Not so: {others}.",
    )
