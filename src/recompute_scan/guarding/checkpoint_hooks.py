"""The guard's places in torch and in libraries: where checkpoint calls pass, and are counted."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from recompute_scan.frameworks.known import MECHANISMS
from recompute_scan.guarding.doors import door
from recompute_scan.guarding.samples import both_runs, recomputing
from recompute_scan.guarding.tallies import TalliedRegion, Tallies
from recompute_scan.record.caught import generator_function, reentrant_function, replace_generator
from recompute_scan.record.guard import Guard, Sheltered, within
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
            replace_generator(self._generator(original), self._patches)
        for entry in dict.fromkeys(e for m in MECHANISMS for e in m.watched):
            self._count_others(entry)

    def remove(self) -> None:
        """Put everything back."""
        self._patches.undo()

    def _generator(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> TalliedRegion:
            keeps = kwargs.get("preserve_rng_state", args[1] if len(args) > 1 else True)
            return self._tallies.entered("non-reentrant", args[0], args[1:], keeps)

        def sampled(
            function: Callable[..., Any],
            region: TalliedRegion,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            call = region.sampling.call()
            if call is None:
                return function, args

            def compared(*args: Any, **kwargs: Any) -> Any:
                inner = function(*args, **kwargs)
                return within(inner, Sheltered(self._guard, call.forward()))

            return compared, (recomputing(args[0], call, self._guard), *args[1:])

        return door(original, enter, self._failed, sampled=sampled)

    def _count_function(self, function: Any) -> None:
        """An autograd function of the reentrant kind, which runs what it is given."""
        torchs = function is reentrant_function()

        def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> TalliedRegion | None:
            at = place(args)
            if at < 0:
                return None
            keeps = args[at + 1] if torchs and len(args) > at + 1 else True
            return self._tallies.entered("reentrant", args[at], args[at + 1 :], keeps)

        original = function.forward
        passing = door(
            original, enter, self._failed, place=place, runs_before=1, sampled=self._both
        )
        self._patches.replace(function, "forward", staticmethod(passing))

    def _both(
        self,
        function: Callable[..., Any],
        region: TalliedRegion,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        call = region.sampling.call()
        if call is None:
            return function, args
        at = place(args)
        return function, (*args[:at], both_runs(args[at], call, self._guard), *args[at + 1 :])

    def _count_others(self, entry: str) -> None:
        name, _, attribute = entry.partition(":")

        def hook(module: ModuleType) -> None:
            function = getattr(module, attribute, None)
            if getattr(function, "forward", None) is not None:
                self._count_function(function)
            elif callable(function):

                def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> TalliedRegion | None:
                    if not args or not callable(args[0]):
                        return None
                    return self._tallies.entered("non-reentrant", args[0], args[1:], True)

                passing = door(function, enter, self._failed, runs_before=1)
                self._patches.replace(module, attribute, passing)

        self._patches.add(after_import(name, self._guard.aside(hook)))


def place(args: tuple[Any, ...]) -> int:
    """Where the checkpointed function is; -1 where none is."""
    return next((n for n, one in enumerate(args[:4]) if callable(one)), -1)
