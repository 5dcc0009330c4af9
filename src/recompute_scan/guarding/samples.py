"""Now and then, one call of one region compared with its recompute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from recompute_scan.faithful import ComparedRegion
from recompute_scan.fidelity.comparing import Comparing
from recompute_scan.fidelity.uses import hook_classes
from recompute_scan.guarding.tallies import TalliedRegion
from recompute_scan.record.compat import compiled_something
from recompute_scan.record.guard import Call, Guard
from recompute_scan.record.module_names import ModuleIndex
from recompute_scan.record.patches import Patches


class Sample:
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
                *(f"{each.name} is updated again" for each in one.states),
            )
        ]


def can_sample() -> bool:
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
