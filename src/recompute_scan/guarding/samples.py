"""Now and then, one call of one region compared with its recompute, within a share of the time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from recompute_scan.faithful import ComparedRegion
from recompute_scan.fidelity.comparing import Comparing
from recompute_scan.fidelity.uses import hook_classes
from recompute_scan.guarding.tallies import TalliedRegion
from recompute_scan.guarding.telling import Pace
from recompute_scan.record.compat import compiled_something
from recompute_scan.record.guard import Call, Guard
from recompute_scan.record.module_names import ModuleIndex
from recompute_scan.record.patches import Patches

_FIRST = 3


class _Sample:
    """One step in which one region is compared; ended by :meth:`end`."""

    def __init__(self, region: TalliedRegion, index: ModuleIndex, guard: Guard) -> None:
        def name_of(module: nn.Module) -> tuple[str, str]:
            found = index.look_up([module])
            return found.name, found.class_name

        self.region = region
        self._guard = guard
        self._patches = Patches()
        self._taken = False
        self._comparing = comparing = Comparing(name_of, guard.around)

        def entered(call: Call, hooks: Any) -> Any:
            comparing.hand_over(hooks)
            return call(hooks)

        for kind in hook_classes():
            self._patches.replace(kind, "__enter__", guard.around(kind.__enter__, entered))
        region.sampling = self

    def call(self) -> Any:
        """The call to compare: the first of the step; ``None`` for the others."""
        if self._taken:
            return None
        self._taken = True
        region = self.region
        known = ComparedRegion(region.name or "", "", region.variant, "", region.site)
        module = region.module
        return self._comparing.region(known, [module] if module is not None else [])

    def end(self) -> list[str] | None:
        """The step is over: what is not the same, by kind; ``None`` where nothing was compared."""
        self.region.sampling = None
        self._patches.undo()
        outcome = self._comparing.outcome()
        if not outcome.compared:
            return None
        return [
            said
            for one in outcome.compared
            for said in (
                *(
                    f"{each.kind} at {each.operation.name}"
                    + (f" ({each.operation.site})" if each.operation.site else "")
                    for each in one.differences
                ),
                *(f"no gradient for {each.name or 'a tensor'}" for each in one.lost),
                *(f"{each.name} is updated again" for each in one.states if each.is_buffer),
            )
        ]


def _can_sample() -> bool:
    """Whether operators can be compared: compiled code runs none."""
    return not compiled_something()


def both_runs(function: Any, call: Any, guard: Guard) -> Callable[..., Any]:
    """The function, whose first run is the forward's and whose later ones are recomputes."""
    has_run = False

    def run(passed: Call, *args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        around = call.recompute() if has_run else call.forward()
        has_run = True
        with around as returned:
            result = passed(*args, **kwargs)
            if returned is not None:
                returned(result)
            return result

    return guard.around(function, run, named=False)


def recomputing(function: Any, call: Any, guard: Guard) -> Callable[..., Any]:
    """The function, whose runs are all recomputes."""

    def run(passed: Call, *args: Any, **kwargs: Any) -> Any:
        with call.recompute():
            return passed(*args, **kwargs)

    return guard.around(function, run, named=False)


class Sampling:
    """Takes one region after another, one in a step, some steps apart.

    What a region's first look shows that is kept between calls (statistics that every recompute
    adds to) was so from the beginning, and is told only where it is new.

    Attributes:
        due: The step from whose end on :meth:`step` has something to do.
    """

    def __init__(self, index: ModuleIndex, guard: Guard, every: int, share: float | None) -> None:
        self._index = index
        self._guard = guard
        self._every = every
        self._share = share
        self.due: float = _FIRST if every else math.inf
        self._turn = 0
        self._sample: _Sample | None = None
        self._began = 0.0
        self._known: dict[str, tuple[str, ...]] = {}

    def step(
        self, number: int, regions: Sequence[TalliedRegion], pace: Pace
    ) -> tuple[TalliedRegion, list[str]] | None:
        """A step has ended: what the comparison in it has shown that is new."""
        sample, self._sample = self._sample, None
        found = None
        if sample is not None:
            said = sample.end()
            spent = time.perf_counter() - self._began
            self.due = number + self._distance(spent, pace.usual_s)
            if said is not None:
                found = self._judged(sample.region, said)
        elif not _can_sample():
            self.due = number + self._every
        elif self._every and number >= self.due:
            named = [one for one in regions if one.name is not None and not one.gone]
            if named:
                self._turn += 1
                self._sample = _Sample(named[self._turn % len(named)], self._index, self._guard)
                self._began = time.perf_counter()
        return found

    def drop(self) -> None:
        """Compare no more."""
        sample, self._sample = self._sample, None
        self._every, self.due = 0, math.inf
        if sample is not None:
            sample.end()

    def _distance(self, spent: float, usual_s: float | None) -> int:
        if self._share is None or not usual_s:
            return self._every
        extra = max(0.0, spent - usual_s)
        return max(self._every, int(extra / (self._share * usual_s)))

    def _judged(
        self, region: TalliedRegion, said: list[str]
    ) -> tuple[TalliedRegion, list[str]] | None:
        before = self._known.get(region.name or "")
        self._known[region.name or ""] = tuple(said)
        if before is None:
            said = [one for one in said if not one.endswith("is updated again")]
        new = [one for one in said if before is None or one not in before]
        return (region, new) if new else None
