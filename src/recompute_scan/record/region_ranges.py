"""Regions and their recomputes as ranges in the trace, opened only while a profiler records."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, Protocol

import torch
from msgspec import Struct

from recompute_scan.annotations import ANNOTATING, RegionAnnotation, recompute_name, region_name
from recompute_scan.fidelity.passing import Application
from recompute_scan.record.caught import Variant
from recompute_scan.record.guard import Guard
from recompute_scan.record.origins import Origin, Origins

# The ranges are opened by these and not by `torch.profiler.record_function`: that one is an
# operator of its own, which a selective checkpoint's dispatch mode would see, count and cache.
_open_range: Any = getattr(torch._C._autograd, "_record_function_with_args_enter", None)
_close_range: Any = getattr(torch._C._autograd, "_record_function_with_args_exit", None)
_recording: Any = getattr(torch._C._autograd, "_profiler_enabled", None)
UNNAMED = "Checkpoint calls could not be named"


Returned = Callable[[Any], None]


class Within(Struct, frozen=True):
    """The innermost region that runs in a thread, and whether that is in a recompute."""

    annotation: RegionAnnotation
    again: bool


class CheckpointCall(Struct, frozen=True):
    """One call of a checkpoint, as far as its wrapper knows it.

    Attributes:
        variant: Which kind of checkpoint it is.
        function: The checkpointed function.
        args: What that is called with.
        frame: The innermost frame of the call.
        options: How the checkpoint is set.
        own: Name of the autograd function where it is none of torch's; else empty.
        library: Name of a library's function that is none of autograd's; else empty.
        application: The call of the autograd function, where it is none of torch's.
    """

    variant: Variant
    function: object
    args: tuple[object, ...]
    frame: FrameType | None
    options: Sequence[str] = ()
    own: str = ""
    library: str = ""
    application: Application | None = None


class RangedRegion(Protocol):
    """What is wrapped around the runs of one checkpointed call."""

    def forward(self, given: Sequence[object] = ()) -> AbstractContextManager[Returned | None]:
        """Around a run in the forward pass; gives what is to be told of its result, if any.

        Args:
            given: What it is called with, where one call may make several runs.
        """

    def recompute(self, given: Sequence[object] = ()) -> AbstractContextManager[Returned | None]:
        """Around each run in a backward pass, likewise."""


class Regions(Protocol):
    """Makes the regions that checkpoint calls ask for."""

    @property
    def wanted(self) -> bool:
        """Whether a call that begins now gets a region."""

    def preparing(self) -> AbstractContextManager[None]:
        """Around all that a wrapper does before the checkpoint itself runs."""

    def region(self, call: CheckpointCall) -> RangedRegion:
        """The region of one call."""

    def around_module(self, call: CheckpointCall) -> AbstractContextManager[None]:
        """Around a call that runs a module in whose place nothing can be put."""


def can_annotate() -> bool:
    """Whether this version of torch has what opens, closes and asks for the ranges."""
    return None not in (_open_range, _close_range, _recording)


class AnnotatedRegions:
    """Regions that annotate the trace, in whatever thread they run."""

    def __init__(self, origins: Origins, guard: Guard) -> None:
        self._origins = origins
        self._guard = guard
        self._calls = itertools.count(1)
        self._thread = threading.local()

    @property
    def wanted(self) -> bool:
        """Whether a profiler records."""
        return bool(_recording())

    @property
    def within(self) -> Within | None:
        """The region that runs in this thread."""
        return getattr(self._thread, "within", None)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Annotates the time that the annotations themselves take, which is no part of the step."""
        opened = _open_range(ANNOTATING)
        try:
            yield
        finally:
            _close_range(opened)

    def region(self, call: CheckpointCall) -> AnnotatedRegion:
        """The region of one call, which puts its runs into ranges."""
        return AnnotatedRegion(self.annotation(call), self._thread)

    def annotation(self, call: CheckpointCall) -> RegionAnnotation:
        """The annotation of one call: its number, its place among the others and its origin."""
        depth = getattr(self._thread, "depth", 0)
        number = next(self._calls)
        origin = Origin()
        with self._guard.part(UNNAMED):
            origin = self._origins.of(call.function, call.args, call.frame, call.options, call.own)
        return RegionAnnotation(
            call=number,
            depth=depth,
            variant=call.variant,
            module=origin.module.name,
            module_class=origin.module.class_name,
            mechanism=origin.mechanism,
            site=origin.site,
            options=",".join(origin.options),
            function=origin.function,
        )

    def around_module(self, _: CheckpointCall) -> AbstractContextManager[None]:
        """Nothing: a module's own runs are not told apart."""
        return nullcontext()


class AnnotatedRegion:
    """One checkpointed call, whose runs carry its annotations."""

    def __init__(self, annotation: RegionAnnotation, thread: threading.local) -> None:
        self._annotation = annotation
        self._forward = region_name(annotation)
        self._recompute = recompute_name(annotation.call)
        self._depth = annotation.depth
        self._thread = thread

    def forward(self, given: Sequence[object] = ()) -> AbstractContextManager[None]:
        """The range of the region."""
        return self._range(self._forward, again=False)

    def recompute(self, given: Sequence[object] = ()) -> AbstractContextManager[None]:
        """The range of one recompute."""
        return self._range(self._recompute, again=True)

    @contextmanager
    def _range(self, name: str, *, again: bool) -> Iterator[None]:
        before = getattr(self._thread, "depth", 0)
        around: Within | None = getattr(self._thread, "within", None)
        self._thread.depth = self._depth + 1
        again = again or (around is not None and around.again)
        self._thread.within = Within(self._annotation, again)
        opened = _open_range(name)
        try:
            yield
        finally:
            _close_range(opened)
            self._thread.depth, self._thread.within = before, around
