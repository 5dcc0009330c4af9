"""Marks checkpointed regions and their recomputes in the trace.

Checkpoints are caught where :mod:`recompute_scan.record.caught` says, and those of other
libraries like torch's own reentrant one. Ranges are opened only while a
profiler records, and never change what is computed.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import torch
import wrapt
from torch import nn

from recompute_scan.annotations import ANNOTATING, RegionAnnotation, recompute_name, region_name
from recompute_scan.frameworks.known import MECHANISMS
from recompute_scan.record.call_sites import CallSites
from recompute_scan.record.caught import (
    Variant,
    generator_function,
    reentrant_function,
    replace_generator,
)
from recompute_scan.record.compare_step import CompareStep
from recompute_scan.record.compat import inputs
from recompute_scan.record.guard import Call, Guard, Sheltered, within
from recompute_scan.record.module_names import ModuleIndex, Untrained
from recompute_scan.record.options import Arguments
from recompute_scan.record.origins import Origin, Origins
from recompute_scan.record.own_functions import own_functions
from recompute_scan.record.patches import Patches, Undo, after_import
from recompute_scan.record.switches import Switches
from recompute_scan.run_info import SwitchedOn

# The ranges are opened by these and not by `torch.profiler.record_function`: that one is an
# operator of its own, which a selective checkpoint's dispatch mode would see, count and cache.
_open_range: Any = getattr(torch._C._autograd, "_record_function_with_args_enter", None)
_close_range: Any = getattr(torch._C._autograd, "_record_function_with_args_exit", None)
_recording: Any = getattr(torch._C._autograd, "_profiler_enabled", None)
# What can be called and has no other use to speak of.
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, functools.partial)
_UNNAMED = "Checkpoint calls could not be named"


class Probe:
    """The annotations of one process.

    Attributes:
        sites: Source lines of the call sites that were named.
        warnings: What could not be watched in this version of torch.
        switched_on: Ways of checkpointing that were on when recording last began.
        entered: Calls of checkpointed regions so far, by variant.
        functions: Line that calls each checkpoint function of which no run can be marked, by name.
        comparison: The step whose recomputes are compared with their forward.
        untrained: Looks for weights that a reentrant checkpoint keeps from their gradients.
    """

    def __init__(self, start_folder: Path, guard: Guard | None = None) -> None:
        self._guard = guard or Guard()
        self.sites = CallSites(start_folder)
        self.untrained = Untrained()
        self.entered: dict[str, int] = {}
        self.functions: dict[str, str] = {}
        self._watched: list[Any] = []
        self._switches = Switches(self.sites, self._guard)
        self._index = ModuleIndex()
        self._origins = Origins(self.sites, self._switches, self._index)
        self._calls = itertools.count(1)
        self._thread = threading.local()
        self._patches = Patches()
        self._warnings: list[str] = []
        self.switched_on: tuple[SwitchedOn, ...] = ()
        self._left_out = False
        self.comparison = CompareStep(self._index, self._guard)

    @property
    def warnings(self) -> list[str]:
        """What could not be watched, one sentence each."""
        return [*self._warnings, *self._switches.warnings, *self._guard.left_out]

    def install(self) -> None:
        """Begin to watch; before the script is imported."""
        if None in (_open_range, _close_range, _recording):
            self._cannot_watch("reentrant")
            self._cannot_watch("non-reentrant")
            return
        self._switches.install()
        self._watch_reentrant()
        self._watch_non_reentrant()
        for entry in dict.fromkeys(e for m in MECHANISMS for e in m.watched):
            self._watch_others(entry)

    def remove(self) -> None:
        """Put torch's own functions back, and the libraries'."""
        self._switches.remove()
        self._patches.undo()

    def at_removal(self, undo: Undo) -> None:
        """Something else to call when torch's functions are put back."""
        self._patches.add(undo)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What the body switches on is not the script's."""
        with self._switches.aside():
            yield

    def leave_out(self, why: str) -> None:
        """Mark nothing from here on, nor say what is on, and warn why."""
        self.remove()
        self._left_out = True
        self._warn(why)

    def begin(self) -> None:
        """Recording is about to start: learn the modules there are now, and what is on."""
        if self._left_out:
            return
        with self._guard.part("Modules could not be named"):
            for function in own_functions():
                if function not in self._watched:
                    self._watch_function(function, known=False)
            self._index.rebuild()
            self.switched_on = self._switches.still_on()

    def asker(
        self,
        function: object,
        args: tuple[object, ...],
        frame: FrameType | None,
        options: Sequence[str] = (),
    ) -> Origin:
        """Module, mechanism and site of the checkpoint call whose innermost frame this is, as
        marked.
        """
        found = [Origin()]
        with self._guard.part(_UNNAMED):
            found.append(self._origins.asker(function, args, frame, options))
        return found[-1]

    def _watch_reentrant(self) -> None:
        function = reentrant_function()
        if getattr(function, "forward", None) is None:
            self._cannot_watch("reentrant")
        else:
            self._watch_function(function)

    def _watch_others(self, entry: str) -> None:
        """Watch a library's own checkpoint function, ``module:name``, once it is imported.

        The name is that of its autograd function, if it has one; else of the function itself.
        """
        name, _, attribute = entry.partition(":")

        def hook(module: ModuleType) -> None:
            function = getattr(module, attribute, None)
            if getattr(function, "forward", None) is not None:
                self._watch_function(function)
            elif callable(function):
                self._watch_call(module, attribute, function)

        self._patches.add(after_import(name, self._guard.aside(hook)))

    def _watch_function(self, function: Any, *, known: bool = True) -> None:
        """Mark what an autograd function of the reentrant kind runs.

        Its forward takes the checkpointed function as the first argument that can be called,
        and keeps it for the recompute. A function of the script's own may do anything else with it
        too: what stands in its place there looks like it in every other respect, and a module,
        which is compared, searched and trained, stays.
        """
        original = function.forward
        own = "" if function is reentrant_function() else function.__name__

        def forward(call: Call, ctx: Any, *args: Any, **kwargs: Any) -> Any:
            # Most of this runs in every step, recorded or not: hence no generators, no copies.
            place: int | None = 0
            if not (args and callable(args[0])):
                place = next((n for n, arg in enumerate(args) if callable(arg)), None)
            if place is not None:
                self._count("reentrant")
                if not _needs_gradient(args):
                    self._suspect(args[place], args[place + 1 :])
                if not (known or isinstance(args[place], _FUNCTIONS)):
                    self._note(function.__name__, sys._getframe(1))
                    if self.comparison.under_way and isinstance(args[place], nn.Module):
                        module, rest = args[place], args[place + 1 :]
                        known_as = self._mark("reentrant", module, rest, own=own)
                        with self.comparison.forward_of(module, known_as):
                            return call(ctx, *args, **kwargs)
                elif self.comparison.under_way or _recording():
                    with _annotating():
                        region = self._region("reentrant", args[place], args[place + 1 :], own=own)
                        both = self._both_runs(args[place], region)
                        if not known:
                            both = _disguised(both, args[place])
                    args = (*args[:place], both, *args[place + 1 :])
            else:
                self._note(function.__name__, sys._getframe(1))
            return call(ctx, *args, **kwargs)

        self._watched.append(function)
        guarded = self._guard.around(original, forward)
        self._patches.replace(function, "forward", staticmethod(guarded))

    def _watch_call(self, module: ModuleType, name: str, original: Any) -> None:
        """Mark what a function of the non-reentrant kind runs; it is its first argument.

        The annotation is made when that runs first, inside the library's function, so that its
        frame is among those that tell the call site.
        """

        def checkpoint(call: Call, function: Any, *args: Any, **kwargs: Any) -> Any:
            self._count("non-reentrant")
            if self.comparison.under_way or _recording():
                function = self._marked_when_run("non-reentrant", function)
            return call(function, *args, **kwargs)

        self._patches.replace(module, name, self._guard.around(original, checkpoint))

    def _watch_non_reentrant(self) -> None:
        original = generator_function()
        if original is None:
            self._cannot_watch("non-reentrant")
            return
        arguments = Arguments(original)

        def generator(call: Call, function: Any, *args: Any, **kwargs: Any) -> Any:
            self._count("non-reentrant")
            if not self.comparison.under_way and not _recording():
                return call(function, *args, **kwargs)
            with _annotating():
                options = arguments.options((function, *args), kwargs)
                region = self._region("non-reentrant", function, inputs(args), options)
                recompute = self._recompute(function, region)
            inner = call(recompute, *args, **kwargs)
            return within(inner, Sheltered(self._guard, region.forward()))

        replace_generator(self._guard.around(original, generator), self._patches)

    def _cannot_watch(self, variant: Variant) -> None:
        self._warn(
            f"This version of torch ({torch.__version__}) has no {variant} checkpoint where it is "
            "looked for, so its regions carry no annotations in the trace."
        )

    def _warn(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.append(text)

    def _mark(
        self,
        variant: Variant,
        function: object,
        args: tuple[object, ...],
        options: Sequence[str] = (),
        own: str = "",
    ) -> RegionAnnotation:
        depth = getattr(self._thread, "depth", 0)
        call = next(self._calls)
        origin = Origin()
        with self._guard.part(_UNNAMED):
            origin = self._origins.of(function, args, sys._getframe(2), options, own)
        return RegionAnnotation(
            call=call,
            depth=depth,
            variant=variant,
            module=origin.module.name,
            module_class=origin.module.class_name,
            mechanism=origin.mechanism,
            site=origin.site,
            options=",".join(origin.options),
            function=origin.function,
        )

    def _region(
        self,
        variant: Variant,
        function: object,
        args: tuple[object, ...],
        options: Sequence[str] = (),
        own: str = "",
    ) -> Region:
        """What is to be done around the runs of this call: annotate them, or compare them."""
        annotation = self._mark(variant, function, args, options, own)
        if not self.comparison.under_way:
            return _Annotated(self._range, annotation)
        return self.comparison.region(annotation, function, args)

    def look_at_gradients(self) -> None:
        """A step has ended: see whether the weights in suspected regions have gradients."""
        with self._guard.part("Gradients could not be seen"), torch._C.DisableTorchFunction():
            self.untrained.look()

    def _count(self, variant: Variant) -> None:
        self.entered[variant] = self.entered.get(variant, 0) + 1

    def _note(self, function: str, frame: FrameType | None) -> None:
        """Where a function is called of which no run is marked, such as a reversible block."""
        if function in self.functions:
            return
        with self._guard.part(_UNNAMED):
            self.functions[function] = self.sites.called_at(frame)

    def _suspect(self, function: object, args: tuple[object, ...]) -> None:
        unseen = self._guard.part("Checkpoint inputs could not be seen")
        with unseen, torch._C.DisableTorchFunction():
            self.untrained.entered(function, args)

    def _both_runs(self, function: Any, region: Region) -> Callable[..., Any]:
        """The function, its first run taken for the forward and later ones for recomputes."""
        around = region.forward

        def run(call: Call, *args: Any, **kwargs: Any) -> Any:
            nonlocal around
            current, around = around, region.recompute
            with current():
                return call(*args, **kwargs)

        return self._guard.around(function, run, named=False)

    def _marked_when_run(self, variant: Variant, function: Any) -> Callable[..., Any]:
        """The function, given an annotation in its first run."""
        both: Callable[..., Any] | None = None

        def run(call: Call, *args: Any, **kwargs: Any) -> Any:
            nonlocal both
            if both is None:
                with _annotating():
                    both = self._both_runs(function, self._region(variant, function, args))
            return call.instead(both, *args, **kwargs)

        return self._guard.around(function, run, named=False)

    def _recompute(self, function: Any, region: Region) -> Callable[..., Any]:
        def recompute(call: Call, *args: Any, **kwargs: Any) -> Any:
            with region.recompute():
                return call(*args, **kwargs)

        return self._guard.around(function, recompute, named=False)

    @contextmanager
    def _range(self, name: str, depth: int) -> Iterator[None]:
        before = getattr(self._thread, "depth", 0)
        self._thread.depth = depth + 1
        opened = _open_range(name)
        try:
            yield
        finally:
            _close_range(opened)
            self._thread.depth = before


class Region(Protocol):
    """One call of a checkpointed region, for what is done around its runs."""

    def forward(self) -> AbstractContextManager[None]:
        """Around the forward's run."""

    def recompute(self) -> AbstractContextManager[None]:
        """Around each recompute."""


class _Annotated:
    """Puts each run into a range of the trace."""

    def __init__(
        self,
        put_into: Callable[[str, int], AbstractContextManager[None]],
        annotation: RegionAnnotation,
    ) -> None:
        self._put_into = put_into
        self._annotation = annotation

    def forward(self) -> AbstractContextManager[None]:
        return self._put_into(region_name(self._annotation), self._annotation.depth)

    def recompute(self) -> AbstractContextManager[None]:
        return self._put_into(recompute_name(self._annotation.call), self._annotation.depth)


def _disguised(function: Callable[..., Any], original: Any) -> Any:
    """The function, with everything but its calls that of the original."""

    def called(_: Any, __: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)

    return wrapt.FunctionWrapper(original, called)


def _needs_gradient(args: tuple[Any, ...]) -> bool:
    with torch._C.DisableTorchFunction():  # no mode or subclass of the script's sees this look
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.requires_grad:
                return True
    return False


@contextmanager
def _annotating() -> Iterator[None]:
    """Marks the time that the annotations themselves take, which is no part of the step."""
    opened = _open_range(ANNOTATING)
    try:
        yield
    finally:
        _close_range(opened)
