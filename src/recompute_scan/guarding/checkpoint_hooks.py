"""The guard's places in torch and in libraries, where checkpoint calls pass and are counted.

A recording's (:mod:`recompute_scan.record.checkpoint_calls`) are the same places. Its functions
prepare names, ranges and options in every call of a few steps; those of the guard count, in every
call of a whole training, and share nothing with them but where torch can be caught.

The functions that calls pass through are entered in every step of a whole training: what might fail
is inside a ``try``, and where it fails the script's call goes on as it would without us.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any

from recompute_scan.frameworks.known import MECHANISMS
from recompute_scan.guarding.samples import both_runs, recomputing
from recompute_scan.guarding.tallies import TalliedRegion, Tallies
from recompute_scan.record.caught import (
    Variant,
    generator_function,
    reentrant_function,
    replace_generator,
)
from recompute_scan.record.compat import (
    compile_frames_by,
    is_compiling,
    run_uncompiled,
    settings_by_name,
)
from recompute_scan.record.guard import Call, Guard, Sheltered, within
from recompute_scan.record.patches import Patches, after_import

# Prepares the call of a region that is to be compared: from its function, where among the arguments
# the checkpointed function is, and the arguments, makes what to call with which arguments.
Sampled = Callable[
    [Callable[..., Any], TalliedRegion, int, tuple[Any, ...]],
    "tuple[Callable[..., Any], tuple[Any, ...]]",
]
_Failed = Callable[[BaseException], None]


class _Inside(threading.local):
    """The region whose recompute this thread is in, the innermost of several."""

    region: TalliedRegion | None = None


_inside = _Inside()


def door(
    original: Callable[..., Any],
    tallies: Tallies,
    variant: Variant,
    failed: _Failed,
    *,
    place: int = 0,
    runs_before: int = 0,
    may_keep: bool = False,
    sampled: Sampled | None = None,
) -> Callable[..., Any]:
    """A function to put in the place of one that takes a function to checkpoint.

    Args:
        original: That one.
        tallies: What counts its calls.
        variant: Which kind of checkpoint it is.
        failed: Gets what failed in us.
        place: Where among the positional arguments the checkpointed function is, as a rule.
        runs_before: How many runs of the checkpointed function are the forward's: 1 where the
            original runs it itself.
        may_keep: Whether what follows the checkpointed function, or ``preserve_rng_state``, says
            whether its random numbers are kept.
        sampled: What to call, and with what, where the region is to be compared.
    """
    known, found, inside = tallies.of(variant), tallies.found, _inside
    keeps_at = place + 1 if may_keep and not settings_by_name() else sys.maxsize

    # What is done here costs several times what it would in a loop of its own, because torch's code
    # ran meanwhile: hence one look by address, and no call that a known region can do without.
    def passing(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # first of all: a compiler that traces this stops here
            return original(*args, **kwargs)
        compiler = compile_frames_by(None)
        call, given, at = original, args, place
        outer, region = inside.region, None
        try:
            region = known.get(id(args[at]))
            if region is None:
                at, region = found(variant, args, at)
            if region is not None:
                region.entered += 1
                if outer is not None:
                    outer.handed_on += outer is region or outer.covers(region)
                if len(args) > keeps_at:
                    region.keeps_random = args[keeps_at]
                elif may_keep:
                    region.keeps_random = kwargs.get("preserve_rng_state", True)
                given = (*args[:at], counted(args[at], region, runs_before), *args[at + 1 :])
                if region.sampling is not None and sampled is not None:
                    call, given = sampled(original, region, at, given)
        except Exception as error:
            call, given = original, args
            failed(error)
        finally:
            if compiler is not None:
                compile_frames_by(compiler)
        done = call(*given, **kwargs)
        # Torch runs the function itself, behind the generator's preparations, at which an outer
        # recompute may end.
        if outer is not None and region is not None and not runs_before:
            return _counts_run(done, region)
        return done

    run_uncompiled(passing)
    passing.__name__ = getattr(original, "__name__", "passing")
    passing.__doc__ = getattr(original, "__doc__", None)
    return passing


def counted(
    function: Callable[..., Any], region: TalliedRegion, forwards: int
) -> Callable[..., Any]:
    """The checkpointed function, whose runs are counted."""
    runs, inside = -forwards, _inside

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal runs
        runs += 1
        outer = inside.region
        if runs <= 0:
            if outer is not None:
                region.nested += 1
            return function(*args, **kwargs)
        region.recomputed += 1
        if runs > 1:
            region.again += 1
        inside.region = region
        try:
            return function(*args, **kwargs)
        finally:  # it may stop early, by an exception
            inside.region = outer

    return counting


def _counts_run(
    prepared: Generator[None, None, None], region: TalliedRegion
) -> Generator[None, None, None]:
    """Torch's generator, which says so where it has come to the function's own run."""
    return within(prepared, _Runs(region))


class _Runs:
    """Counts that the function of a region runs in another's recompute."""

    def __init__(self, region: TalliedRegion) -> None:
        self._region = region

    def __enter__(self) -> None:
        self._region.nested += 1

    def __exit__(self, *_: object) -> None:
        """Nothing is to be undone."""


# Once for all: what is kept from being compiled is the code, which every call's function shares.
run_uncompiled(counted(len, TalliedRegion("reentrant", None, "", ""), 0))


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
