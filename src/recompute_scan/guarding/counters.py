"""Checkpoint calls counted per module and step, and which modules are trained.

The guard replaces the same functions as a recording (:mod:`recompute_scan.record.checkpoint_calls`)
and shares nothing else with it: a recording prepares names, ranges and options in every call of a
few steps, and the guard only counts, in every call of a whole training. Code that might fail is
inside a ``try``; where it fails, the script's call goes on as it would without us.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import astuple
from torch import nn

from recompute_scan.fidelity.state import named_parts, weights
from recompute_scan.guarding.alerts import compared_runs
from recompute_scan.guarding.judge import SeenStep, TalliedRegion, Tallies, Training, WatchedPart
from recompute_scan.record.isolation import Call, Guard, Patches, Sheltered, within
from recompute_scan.record.modules import ModuleIndex, plain_name, root_modules
from recompute_scan.record.origins import (
    Variant,
    catch_others,
    generator_function,
    reentrant_function,
    replace_generator,
)
from recompute_scan.record.torch_versions import (
    compile_frames_by,
    is_compiling,
    run_uncompiled,
    settings_by_name,
)

# Prepares the call of a region that is to be compared: from its function, where among the arguments
# the checkpointed function is, and the arguments, makes what to call with which arguments.
Sampled = Callable[
    [Callable[..., Any], TalliedRegion, int, tuple[Any, ...]],
    "tuple[Callable[..., Any], tuple[Any, ...]]",
]
_Failed = Callable[[BaseException], None]


class _Inside(threading.local):
    """The region that this thread recomputes, the innermost of several."""

    region: TalliedRegion | None = None


_inside = _Inside()


class Kind(Struct, frozen=True):
    """A kind of function that takes a function to checkpoint.

    Attributes:
        variant: Which kind of checkpoint it makes.
        place: Where among the positional arguments the checkpointed function is, as a rule.
        runs_before: How many runs of the checkpointed function are the forward's: 1 where this one
            runs it itself.
        may_keep: Whether what follows the checkpointed function, or ``preserve_rng_state``, says
            whether its random numbers are kept.
        sampled: What to call, and with what, where the region is to be compared.
    """

    variant: Variant
    place: int = 0
    runs_before: int = 0
    may_keep: bool = False
    sampled: Sampled | None = None


def counted(
    function: Callable[..., Any], region: TalliedRegion, forwards: int
) -> Callable[..., Any]:
    """The checkpointed function, with its runs counted."""
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


class _Runs(Struct, eq=False):
    """Counts that the function of a region runs in another's recompute."""

    _region: TalliedRegion

    def __enter__(self) -> None:
        self._region.nested += 1

    def __exit__(self, *_: object) -> None:
        """Nothing is to be undone."""


# Once for all: what is kept from being compiled is the code, which every call's function shares.
run_uncompiled(counted(len, TalliedRegion("reentrant", None, "", ""), 0))


class CheckpointHooks:
    """Counts checkpoint calls between :meth:`install` and :meth:`remove`."""

    def __init__(self, tallies: Tallies, guard: Guard, failed: _Failed) -> None:
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
            kind = Kind("non-reentrant", may_keep=True, sampled=self._sampled)
            replace_generator(self._door(original, kind), self._patches)
        catch_others(self._count_function, self._count_other, self._patches, self._guard)

    def remove(self) -> None:
        """Put everything back."""
        self._patches.undo()

    def _door(self, original: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
        """A function to put in the place of the original, with its calls counted."""
        known, found = self._tallies.of(kind.variant), self._tallies.found
        failed, inside = self._failed, _inside
        variant, place, runs_before, may_keep, sampled = astuple(kind)
        keeps_at = place + 1 if may_keep and not settings_by_name() else sys.maxsize

        # This code takes several times as long as in a loop by itself, because torch's code ran
        # meanwhile: hence one look by address, and no call that a known region can do without.
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
                return within(done, _Runs(region))
            return done

        run_uncompiled(passing)
        passing.__name__ = getattr(original, "__name__", "passing")
        passing.__doc__ = getattr(original, "__doc__", None)
        return passing

    def _sampled(
        self, function: Callable[..., Any], region: TalliedRegion, at: int, args: tuple[Any, ...]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        call = region.sampling.call(args[at])
        if call is None:
            return function, args
        generator = region.variant == "non-reentrant"

        def compared(passed: Call, *args: Any, **kwargs: Any) -> Any:
            inner = passed(*args, **kwargs)
            return within(inner, Sheltered(self._guard, call.forward()))

        runs = compared_runs(args[at], call, self._guard, has_run=generator)
        if generator:
            function = self._guard.around(function, compared, named=False)
        return function, (*args[:at], runs, *args[at + 1 :])

    def _count_function(self, function: Any) -> None:
        """An autograd function of the reentrant kind, which runs what it is given."""
        kind = Kind(
            "reentrant",
            place=1,  # behind the context
            runs_before=1,
            may_keep=function is reentrant_function(),
            sampled=self._sampled,
        )
        passing = self._door(function.forward, kind)
        self._patches.replace(function, "forward", staticmethod(passing))

    def _count_other(self, module: ModuleType, name: str) -> None:
        passing = self._door(getattr(module, name), Kind("non-reentrant", runs_before=1))
        self._patches.replace(module, name, passing)


_LEAST = 0.5
# Searches for the names of modules; scripts that make models without end get names by class.
_SEARCHES = 50


class RegionNames:
    """Gives names to regions that were recomputed for the first time."""

    def __init__(self, index: ModuleIndex) -> None:
        self._index = index
        self._searches = 0

    def give(self, regions: Sequence[TalliedRegion]) -> None:
        """Name what has no name yet: qualified names, or function and line."""
        new = [one for one in regions if one.name is None and one.recomputed]
        if not new:
            return
        if self._searches < _SEARCHES:
            self._searches += 1
            self._index.rebuild()
        for region in new:
            module = region.module
            if module is None:
                at = f" ({region.site})" if region.site else ""
                region.name = f"{region.function}{at}"
            else:
                found = self._index.look_up([module])
                region.name = found.name or found.class_name


def seen_step(regions: Sequence[TalliedRegion]) -> dict[str, SeenStep]:
    """The checkpoints of each module in the step that has ended, by its name."""
    found: dict[str, tuple[list[WatchedPart], list[str]]] = {}
    for region in regions:
        if region.name is None or not region.entered + region.recomputed:
            continue
        mine, at = found.setdefault(region.name, ([], []))
        if region.runs_again:
            mine.append(
                WatchedPart(
                    region.variant, bool(region.keeps_random), region.nested > 0, region.again > 0
                )
            )
            if region.site:
                at.append(region.site)
    return {name: SeenStep(tuple(sorted(mine)), tuple(at)) for name, (mine, at) in found.items()}


class Trained:
    """Looks at the gradients that are there when an optimizer has made its step."""

    def __init__(self, then: Iterable[str] = ()) -> None:
        self._then = set(then)
        self._step = -1
        self._found: dict[str, nn.Module] = {}

    def remember(self) -> None:
        """The first steps are over: keep which modules have gradients."""
        with torch._C.DisableTorchFunction():
            for name, module in _named():
                if any(p.grad is not None for p in weights(module)):
                    self._then.add(name)

    def then(self, name: str) -> bool:
        """Whether the module was trained when the first steps were over."""
        return bool({name, name.partition("-")[0]} & self._then)

    def names(self) -> tuple[str, ...]:
        """The modules that were trained, for a stored baseline."""
        return tuple(sorted(self._then))

    def now(self, name: str, modules: Sequence[nn.Module], step: int) -> Training:
        """Whether the module is trained in this step; looked for where no such objects live."""
        if modules:
            return _training(modules[-1])
        if step != self._step:  # one search for all the modules that are asked for
            self._step, self._found = step, dict(_named())
        # As it is, the first of a run of modules, or without the model's name.
        for one in (name, name.partition("-")[0], name.partition(".")[2]):
            if one and one in self._found:
                return _training(self._found[one])
        return "unknown"

    def let_go(self) -> None:
        """Hold no modules."""
        self._step, self._found = -1, {}


def _training(module: nn.Module) -> Training:
    with torch._C.DisableTorchFunction(), torch.no_grad():
        parameters = list(weights(module))
        if not parameters:
            return "unknown"
        wanted = [one for one in parameters if one.requires_grad]
        if not wanted:
            return "frozen"
        reached = sum(one.grad is not None and bool((one.grad != 0).any()) for one in wanted)
    return "trained" if reached >= _LEAST * len(wanted) else "idle"


def _named() -> list[tuple[str, nn.Module]]:
    roots = [(root, list(named_parts(root))) for root in root_modules()]
    # A larger model's names replace a smaller's.
    roots.sort(key=lambda each: len(each[1]))
    return [(plain_name(name), module) for _, names in roots for name, module in names]
