"""Regions as ranges in the trace, and the regions to compare.

Ranges are opened only while a profiler records. Before that, the runs of checkpointed blocks in one
step are counted by the hooks alone: the first answer of a run.
"""

from __future__ import annotations

import inspect
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from msgspec import Struct, field
from torch import nn

from recompute_scan.annotations import ANNOTATING, RegionAnnotation, recompute_name, region_name
from recompute_scan.crash import code_of
from recompute_scan.fidelity.comparison import Comparing, RegionCall, Returned
from recompute_scan.fidelity.lost_gradients import hook_classes
from recompute_scan.fidelity.operators import tensors
from recompute_scan.fidelity.state import named_parts
from recompute_scan.frameworks.pytorch import RUN_BACKWARD
from recompute_scan.record.isolation import Call, Guard, Patches
from recompute_scan.record.modules import (
    ModuleIndex,
    covered_modules,
    parameter_names,
    root_modules,
)
from recompute_scan.record.origins import CheckpointCall, Origin, Origins
from recompute_scan.record.steps import Plan, current_pass, in_backward
from recompute_scan.result.fidelity import ComparedRegion, Fidelity
from recompute_scan.result.run_record import Counted

# The ranges are opened by these and not by `torch.profiler.record_function`: that one is an
# operator itself, which a selective checkpoint's dispatch mode would see, count and cache.
_open_range: Any = getattr(torch._C._autograd, "_record_function_with_args_enter", None)
_close_range: Any = getattr(torch._C._autograd, "_record_function_with_args_exit", None)
_recording: Any = getattr(torch._C._autograd, "_profiler_enabled", None)
UNNAMED = "Checkpoint calls could not be named"


# The innermost region that runs in a thread, if any, and whether that is in a recompute.
Within = tuple[RegionAnnotation | None, bool]


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
        return bool(_recording())

    @property
    def within(self) -> Within:
        return getattr(self._thread, "within", (None, False))

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
            origin = self._origins.of(call)
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


class AnnotatedRegion:
    """One checkpointed call; its runs carry its annotations."""

    def __init__(self, annotation: RegionAnnotation, thread: threading.local) -> None:
        self._annotation = annotation
        self._forward = region_name(annotation)
        self._recompute = recompute_name(annotation.call)
        self._depth = annotation.depth
        self._thread = thread

    def forward(self, given: Sequence[object] = ()) -> AbstractContextManager[None]:
        return self._range(self._forward, again=False)

    def recompute(self, given: Sequence[object] = ()) -> AbstractContextManager[None]:
        return self._range(self._recompute, again=True)

    @contextmanager
    def _range(self, name: str, *, again: bool) -> Iterator[None]:
        before = getattr(self._thread, "depth", 0)
        around: Within = getattr(self._thread, "within", (None, False))
        self._thread.depth = self._depth + 1
        self._thread.within = self._annotation, again or around[1]
        opened = _open_range(name)
        try:
            yield
        finally:
            _close_range(opened)
            self._thread.depth, self._thread.within = before, around


def needs_gradient(args: Iterable[object]) -> bool:
    """Does one of these arguments need a gradient?"""
    with torch._C.DisableTorchFunction():  # no mode or subclass of the script's sees this look
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.requires_grad:
                return True
    return False


class CountedRuns:
    """Counts the runs of checkpointed blocks, forward and again, without a profiler.

    Of nested checkpoints around one block the innermost is entered for each run of it, so only
    runs count that call no other. Forward runs that no backward pass can follow, as in an
    evaluation, do not count.

    Several backward passes can go through one forward pass, and each asks the outermost checkpoint
    of a run again. Checkpoints inside it, and the passes that a reentrant one starts, belong
    to the pass that asked.

    A backward pass that begins inside another one and follows no counted recompute is code's that
    may run forward work again too, and is not known.
    """

    def __init__(self) -> None:
        self._runs: dict[object, _BlockRuns] = {}
        self._nested: int | None = None
        self._expected: set[int | None] = set()
        self._calls = itertools.count()
        self._modules: dict[int, nn.Module] = {}
        self._thread = threading.local()

    def region(self, call: CheckpointCall, ranges: AnnotatedRegion | None) -> CountedRegion:
        """The region of one call: its runs count for its block, and open `ranges` if given."""
        covered = covered_modules(call.function, call.args)
        self._modules.update((id(one), one) for one in covered)
        block: object = id(covered[0]) if covered else id(code_of(call.function))
        around: _Run | None = getattr(self._thread, "run", None)
        asked = around.asked if around is not None else (next(self._calls), None)
        if around is not None:
            around.holds = True
        own_pass = call.variant == "reentrant"
        return CountedRegion(self, block, call.differentiated, ranges, asked, own_pass)

    def watch_passes(self, patches: Patches, guard: Guard) -> None:
        """Count nested passes, too, where this torch starts them all by one function."""

        def run_backward(call: Call, /, *args: Any, **kwargs: Any) -> Any:
            around = current_pass()
            if around is not None and around not in self._expected:
                self._nested = (self._nested or 0) + 1
            self._expected.discard(around)
            return call(*args, **kwargs)

        if hasattr(torch.autograd, RUN_BACKWARD):
            self._nested = 0
            for owner in (torch.autograd, torch.autograd.graph):
                patches.wrap(guard, owner, RUN_BACKWARD, run_backward)

    def expect_pass(self) -> None:
        """A recompute begins, and a backward pass through it follows."""
        self._expected.add(current_pass())

    @contextmanager
    def run(self, region: CountedRegion) -> Iterator[None]:
        """Around one run of the region's block; whether it counts is for the outermost to say."""
        around: _Run | None = getattr(self._thread, "run", None)
        within = current_pass()
        outermost, asking = around.asked if around is not None else region.asked
        asked = (outermost, within if asking is None else asking)
        run = self._thread.run = _Run(region.followed if around is None else around.counts, asked)
        try:
            yield
        finally:
            self._thread.run = around
            if not run.holds and (within is not None or run.counts):
                runs = self._runs.setdefault(region.block, _BlockRuns())
                if within is None:
                    runs.forward[outermost] += 1
                else:
                    runs.again[asked] += 1

    def in_step(self, step: int) -> Counted:
        kinds = {type(module) for module in self._modules.values()}
        inside = {id(one) for module in self._modules.values() for one in module.modules()}
        others = {
            id(part)
            for root in (root_modules() if kinds else ())
            for _, part in named_parts(root)
            if type(part) in kinds and part.training and inside.isdisjoint(map(id, part.modules()))
        }
        known = [one for one in self._runs.values() if one.forward]
        return Counted(
            step,
            tuple((one.forward.total(), one.again.total()) for one in known),
            len(others),
            tuple(one.asked for one in known),
            self._nested,
        )


class _Run(Struct):
    """A run that is under way.

    Attributes:
        counts: Whether it counts.
        asked: The call of the outermost checkpoint around it, by number, and the backward pass
            that asked for it.
        holds: Whether a checkpoint was called in it. That one's own run may not follow: a
            recompute ends as soon as it has what it was asked for.
    """

    counts: bool
    asked: tuple[int, int | None]
    holds: bool = False


class _BlockRuns(Struct, eq=False):
    """The runs of one block in a step.

    Attributes:
        forward: Those in the forward pass, by the outermost checkpoint around them.
        again: Those in backward passes, by that checkpoint and the pass.
    """

    forward: Counter[int] = field(default_factory=Counter)
    again: Counter[tuple[int, int | None]] = field(default_factory=Counter)

    @property
    def asked(self) -> int:
        """The forward runs, each as often as a backward pass ran it again, and at least once."""
        passes = Counter(outermost for outermost, _ in self.again)
        return sum(runs * max(1, passes[outermost]) for outermost, runs in self.forward.items())


class CountedRegion(Struct, frozen=True):
    """One checkpointed call, with its runs counted.

    ``asked`` names the outermost checkpoint and its pass, as in :class:`_Run`; ``own_pass`` says
    whether a backward pass begins after each recompute.
    """

    counts: CountedRuns
    block: object
    followed: bool
    ranges: AnnotatedRegion | None
    asked: tuple[int, int | None]
    own_pass: bool

    @property
    def in_backward(self) -> bool:
        """Whether a run that begins now is a recompute."""
        return current_pass() is not None

    @contextmanager
    def forward(self, given: Sequence[object] = ()) -> Iterator[None]:
        """Around a run in the forward pass, or in the recompute of a checkpoint around this one."""
        with self.ranges.forward() if self.ranges else nullcontext(), self.counts.run(self):
            yield

    @contextmanager
    def recompute(self, given: Sequence[object] = ()) -> Iterator[None]:
        """Around each run in a backward pass."""
        if self.own_pass:
            self.counts.expect_pass()
        with self.ranges.recompute() if self.ranges else nullcontext(), self.counts.run(self):
            yield


# Wraps the runs of one checkpointed call: `forward` those in the forward pass, `recompute` those in
# backward passes; both give a function for the result, where it is compared.
RangedRegion = AnnotatedRegion | CountedRegion | RegionCall


class FirstWord:
    """Counts in the second step how often its blocks run again, and prints it.

    The first step of all may compile, and make what others reuse: its count stands only until
    there is another, or where the warm-up has no room for one. Timed steps do nothing but train.

    It begins to count now.
    """

    def __init__(self, step: ComparedRegions, plan: Plan, say: Callable[[str], None]) -> None:
        self._step, self._plan, self._say = step, plan, say
        self.over = False
        step.count(passes=False)  # the script may import torch's functions in this step

    def wait(self) -> None:
        """A step has ended that is like none to come: count the next one."""
        self._step.count()

    def boundary(self, made: int, step_s: float) -> Counted | None:
        """So many steps have ended, and the last took so long: the counts of that step."""
        counted = self._step.counted(made)
        plan, last = self._plan, made > 1 or made >= self._plan.warmup
        # Where no step is timed, the profiler runs already in the last warm-up step.
        self.over = last or bool(plan.steps and not plan.timing and made + 1 == plan.warmup)
        if not self.over:
            self._step.count()
            return counted
        self._step.forget()
        if last and counted is not None:
            step, left = plan.at(made, step_s)
            self._say(f"{step}: {counted.described}" + f"; {left}" * (made > 1))
        return counted


class ComparedRegions:
    """Regions that are annotated, and compared between :meth:`compare` and :meth:`compared`.

    Attributes:
        functions: Autograd functions of reentrant checkpoints.
        learn: Finds the ones that the script has made by now.
        forget: Lets those run as without us, as in timed steps, until it learns again.
    """

    def __init__(self, annotated: AnnotatedRegions, index: ModuleIndex, guard: Guard) -> None:
        self._annotated = annotated
        self._index = index
        self._guard = guard
        self._comparing: Comparing | None = None
        self._counting: CountedRuns | None = None
        self._patches = Patches()
        self._modules: dict[int, _ModuleRuns] = {}
        self.functions: list[Any] = []
        self.learn: Callable[[], None] = lambda: None
        self.forget: Callable[[], None] = lambda: None
        self._learned = True

    def count(self, *, passes: bool = True) -> None:
        """Count the runs in the step that begins; with ``passes`` other starts of passes, too."""
        self._leave()
        self._counting = counting = CountedRuns()
        self._learned = passes
        if passes:
            self.learn()
            counting.watch_passes(self._patches, self._guard)

    def counted(self, step: int) -> Counted | None:
        """It has ended, as this one of all: its runs."""
        counting, self._counting = self._counting, None
        self._leave()
        return counting.in_step(step) if counting is not None else None

    def compare(self) -> None:
        name_of, around = self._index.name_of, self._guard.around
        comparing = self._comparing = Comparing(name_of, around, parameter_names)
        self._watch_what_leaves(comparing)
        watch_what_is_handed(comparing, self._guard, self._patches)

    def _watch_what_leaves(self, comparing: Comparing) -> None:
        """Of reentrant checkpoints, to the backward pass."""
        leaving, thread = comparing.leaving, threading.get_ident()

        def apply(call: Call, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread or in_backward():
                return call(*args, **kwargs)
            with leaving.applying(args[1:]):
                return call(*args, **kwargs)

        # Bound to the class that is asked: one may inherit what is put here from another.
        found = [(one, inspect.getattr_static(one, "apply", None)) for one in self.functions]
        for function, original in found:
            if isinstance(original, classmethod):
                around = self._guard.around(original.__func__, apply, named=False)
                self._patches.replace(function, "apply", classmethod(around))

        def switched(by: int, call: Call, /, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                leaving.switched_off += by
            return call(*args, **kwargs)

        for name, by in (("__enter__", 1), ("__exit__", -1)):
            self._patches.wrap(self._guard, torch.no_grad, name, partial(switched, by))

        def differentiate(name: str, call: Call, /, *args: Any, **kwargs: Any) -> Any:
            outermost = not in_backward()
            if outermost and threading.get_ident() == thread:
                leaving.differentiated(tensors((*args[:1], *kwargs.values())))
            result = call(*args, **kwargs)
            if outermost:
                to_all = name == "backward" and len(args) < 6 and not kwargs.get("inputs")
                comparing.differentiated(to_all=to_all)
            return result

        for name in ("backward", "grad"):
            self._patches.wrap(self._guard, torch.autograd, name, partial(differentiate, name))

    def compared(self) -> Fidelity:
        """The step has ended: what it has shown. Nothing of it is left in the process."""
        comparing, self._comparing = self._comparing, None
        try:
            return comparing.outcome() if comparing is not None else Fidelity()
        finally:
            self._leave()

    def _leave(self) -> None:
        self._patches.undo()
        self._modules.clear()

    @property
    def wanted(self) -> bool:
        """Whether recomputes are compared or counted, or a profiler records."""
        watched = self._comparing is not None or self._counting is not None
        return watched or self._annotated.wanted

    def preparing(self) -> AbstractContextManager[None]:
        """As :meth:`AnnotatedRegions.preparing`; a step that is compared is not timed."""
        counts = self._counting is not None and not self._annotated.wanted
        annotates = self._comparing is None and not counts
        return self._annotated.preparing() if annotates else nullcontext()

    def region(self, call: CheckpointCall) -> RangedRegion:
        if self._comparing is not None:
            return self._compared(self._comparing, call)
        if self._counting is None:
            return self._annotated.region(call)
        if not self._learned:
            self._learned = True
            self.learn()
        ranges = self._annotated.region(call) if self._annotated.wanted else None
        return self._counting.region(call, ranges)

    def _compared(self, comparing: Comparing, call: CheckpointCall) -> RegionCall:
        annotation = self._annotated.annotation(call)
        known = ComparedRegion(
            module=annotation.module,
            module_class=annotation.module_class,
            variant=annotation.variant,
            mechanism=annotation.mechanism,
            site=annotation.site,
            options=tuple(filter(None, annotation.options.split(","))),
            function=call.own or call.library,
        )
        covered = covered_modules(call.function, call.args, every=True)
        return comparing.region(known, call.function, covered, call.application)

    def around_module(self, call: CheckpointCall) -> AbstractContextManager[None]:
        """Around a checkpoint function of the script that runs a module by itself, and keeps it for
        the recompute: nothing can take the place of a module, so its ``forward`` is replaced
        until the step has ended, by a method: a copy that is made meanwhile has one that is bound
        to the copy, and a pickle names the class's.
        """
        module = call.function
        either = self._comparing or self._counting
        if either is None or not isinstance(module, nn.Module):
            return nullcontext()
        runs = self._modules.get(id(module))
        if runs is None:
            plain = module.forward
            if "forward" in vars(module) or not isinstance(plain, MethodType):
                return nullcontext()
            runs = self._modules[id(module)] = _ModuleRuns()
            followed = self._followed(plain.__func__)
            self._patches.replace(module, "forward", MethodType(followed, module))
        return runs.forward_of(
            either.region(call, None)
            if isinstance(either, CountedRuns)
            else self._compared(either, call)
        )

    def _followed(self, original: Any) -> Callable[..., Any]:
        def forward(call: Call, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            runs = self._modules.get(id(module))
            if runs is None:  # a copy
                return call(module, *args, **kwargs)
            with runs.next((*args, kwargs)) as returned:
                result = call(module, *args, **kwargs)
                if returned is not None:
                    returned(result)
                return result

        followed = self._guard.around(original, forward)
        followed.__name__ = "forward"  # by which a pickle finds the class's
        return followed


def watch_what_is_handed(comparing: Comparing, guard: Guard, patches: Patches) -> None:
    """Have non-reentrant checkpoints hand over their hooks, before these are put in place."""

    def entered(call: Call, hooks: Any) -> Any:
        comparing.hand_over(hooks)
        return call(hooks)

    for kind in hook_classes():
        patches.wrap(guard, kind, "__enter__", entered)


class _ModuleRuns:
    """Which call of the checkpoint function a run of one module belongs to."""

    def __init__(self) -> None:
        self._entered: RegionCall | CountedRegion | None = None
        self._called: list[RegionCall | CountedRegion] = []

    @contextmanager
    def forward_of(self, region: RegionCall | CountedRegion) -> Iterator[None]:
        self._entered = region
        self._called.append(region)
        try:
            yield
        finally:
            self._entered = None

    def next(self, given: Sequence[object]) -> AbstractContextManager[Returned | None]:
        """Around the run that begins now, with these arguments."""
        if self._entered is not None:
            return self._entered.forward(given)
        region = next((one for one in reversed(self._called) if one.in_backward), None)
        return nullcontext() if region is None else region.recompute(given)
