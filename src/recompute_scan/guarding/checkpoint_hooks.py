"""The guard's places in torch and in libraries: where checkpoint calls pass, and are counted.

A recording's (:mod:`recompute_scan.record.checkpoint_calls`) are the same places. Its functions
prepare names, ranges and options in every call of a few steps; those of the guard count, in every
call of a whole training, and share nothing with them but where torch can be caught.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from recompute_scan.frameworks.known import MECHANISMS
from recompute_scan.guarding.doors import door
from recompute_scan.guarding.samples import both_runs, recomputing
from recompute_scan.guarding.tallies import TalliedRegion, Tallies
from recompute_scan.record.caught import generator_function, reentrant_function, replace_generator
from recompute_scan.record.guard import Call, Guard, Sheltered, within
from recompute_scan.record.patches import Patches, after_import


class CheckpointHooks:
    """Counts checkpoint calls between :meth:`install` and :meth:`remove`."""

    def __init__(
        self, tallies: Tallies, guard: Guard, failed: Callable[[BaseException], None]
    ) -> None:
        self._tallies = tallies
        self._guard = guard
        self._failed = failed
        self._patches = Patches()

    def install(self) -> None:
        """Begin to count."""
        reentrant = reentrant_function()
        if getattr(reentrant, "forward", None) is not None:
            self._count_function(reentrant)
        original = generator_function()
        if original is not None:
            passing = door(
                original,
                self._tallies,
                "non-reentrant",
                self._failed,
                may_keep=True,
                sampled=self._generator,
            )
            replace_generator(passing, self._patches)
        for entry in dict.fromkeys(e for m in MECHANISMS for e in m.watched):
            self._count_others(entry)

    def remove(self) -> None:
        """Put everything back."""
        self._patches.undo()

    def _generator(
        self, function: Callable[..., Any], region: TalliedRegion, at: int, args: tuple[Any, ...]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        call = region.sampling.call()
        if call is None:
            return function, args

        def compared(passed: Call, *args: Any, **kwargs: Any) -> Any:
            inner = passed(*args, **kwargs)
            return within(inner, Sheltered(self._guard, call.forward()))

        around = self._guard.around(function, compared, named=False)
        return around, _with(args, at, recomputing(args[at], call, self._guard))

    def _both(
        self, function: Callable[..., Any], region: TalliedRegion, at: int, args: tuple[Any, ...]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        call = region.sampling.call()
        if call is None:
            return function, args
        return function, _with(args, at, both_runs(args[at], call, self._guard))

    def _count_function(self, function: Any) -> None:
        """An autograd function of the reentrant kind, which runs what it is given."""
        passing = door(
            function.forward,
            self._tallies,
            "reentrant",
            self._failed,
            place=1,  # behind the context
            runs_before=1,
            may_keep=function is reentrant_function(),
            sampled=self._both,
        )
        self._patches.replace(function, "forward", staticmethod(passing))

    def _count_others(self, entry: str) -> None:
        name, _, attribute = entry.partition(":")

        def hook(module: ModuleType) -> None:
            function = getattr(module, attribute, None)
            if getattr(function, "forward", None) is not None:
                self._count_function(function)
            elif callable(function):
                passing = door(
                    function, self._tallies, "non-reentrant", self._failed, runs_before=1
                )
                self._patches.replace(module, attribute, passing)

        self._patches.add(after_import(name, self._guard.aside(hook)))


def _with(args: tuple[Any, ...], at: int, function: Callable[..., Any]) -> tuple[Any, ...]:
    return (*args[:at], function, *args[at + 1 :])
