"""Calls of both checkpoint variants, each given its region.

Checkpoints are caught where :mod:`recompute_scan.record.origins` says, and other
libraries' like torch's own reentrant one. Regions (:mod:`recompute_scan.record.region_ranges`) wrap
the forward's run and the recomputes; the computation never changes.

A checkpoint's backward turns gradients on, runs something again and starts a backward pass. The
names in the code of its ``backward`` show that; the trace shows whether it does run anything again.

Private names of torch are replaced. A version that keeps such a name and calls another would leave
its checkpoints without annotations, and missing annotations mislead: switches would seem to do
nothing, and recomputes to have no cause. So before the script runs, torch is asked for one
checkpoint of each kind, which ends where ours would begin: no operator runs, no random number is
drawn, no thread is started, and no device is looked for. Where a kind is not caught, nothing is
annotated at all, and the trace is read as any other is.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
import wrapt
from msgspec import Struct
from torch import nn

from recompute_scan.annotations import RANDOM_STATE_LEFT
from recompute_scan.fidelity.lost_gradients import Application
from recompute_scan.fidelity.state import named_in
from recompute_scan.record.attribution import CallSites
from recompute_scan.record.isolation import Call, Guard, Patches, Sheltered, after_import, within
from recompute_scan.record.modules import ModuleIndex, Untrained
from recompute_scan.record.origins import (
    WRAPPER_MODULE,
    Arguments,
    CheckpointCall,
    Origin,
    Origins,
    Switches,
    Variant,
    catch_others,
    generator_function,
    reentrant_function,
    replace_generator,
)
from recompute_scan.record.policies import DecisionWatch
from recompute_scan.record.region_ranges import (
    UNNAMED,
    AnnotatedRegions,
    ComparedRegions,
    RangedRegion,
    can_annotate,
    needs_gradient,
)
from recompute_scan.record.torch_versions import inputs
from recompute_scan.result.run_record import SwitchedOn
from recompute_scan.work import Ledger, StepWatch

_TURNS_ON = frozenset({"enable_grad", "set_grad_enabled"})
_DEEPEST = 2
# Types that have hardly any use but to be called.
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, functools.partial)


class Probe:
    """The annotations of one process.

    Attributes:
        sites: Source lines of the call sites that were named.
        switches: Where checkpoints were switched on.
        patches: What is put back in the end.
        warnings: What could not be watched in this version of torch.
        switched_on: Ways of checkpointing that were on when recording last began.
        entered: Calls of checkpointed regions so far, by variant.
        functions: By name, the line that calls each checkpoint function that is not annotated.
        comparison: Compares the recomputes of one step with their forward.
        policies: The step in which policies of selective checkpoints are seen deciding.
        untrained: Looks for weights that a reentrant checkpoint keeps from their gradients.
    """

    def __init__(self, start_folder: Path, guard: Guard | None = None) -> None:
        self._guard = guard or Guard()
        self.sites = CallSites(start_folder)
        self.switches = Switches(self.sites, self._guard)
        self._index = ModuleIndex()
        self._origins = Origins(self.sites, self.switches, self._index)
        self.patches, self._own = Patches(), Patches()
        annotated = AnnotatedRegions(self._origins, self._guard)
        self.comparison = ComparedRegions(annotated, self._index, self._guard)
        self.policies = DecisionWatch(self.sites, self._guard, lambda: annotated.within)
        self.comparison.learn, self.comparison.forget = self._learn, self._own.undo
        self.untrained = Untrained()
        self.entered: Counter[str] = Counter()
        self.functions: dict[str, str] = {}
        self._warnings: list[str] = []
        self.switched_on: tuple[SwitchedOn, ...] = ()
        self._left_out = False

    @property
    def warnings(self) -> list[str]:
        """The kinds of checkpoints that could not be watched, one sentence each."""
        return [*self._warnings, *self.switches.warnings, *self._guard.left_out]

    def install(self) -> None:
        """Begin to watch; before the script is imported."""
        possible = can_annotate()
        if possible:
            self.switches.install()
        if not (possible and self._watch_reentrant()):
            self._cannot_watch("reentrant")
        if not (possible and self._watch_non_reentrant()):
            self._cannot_watch("non-reentrant")
        if possible:
            # Libraries' checkpoint functions, once they are imported.
            catch_others(self._watch_function, self._watch_call, self.patches, self._guard)

    def remove(self) -> None:
        self.comparison.compared()
        self.policies.end()
        self.switches.remove()
        self._own.undo()
        self.patches.undo()

    def watch(self, cuda: bool) -> StepWatch:
        """The watch over two steps; it knows the modules that exist by now."""
        sites, guard = self.sites, self._guard
        return StepWatch(
            Ledger(sites.line_of),
            self._index.name_of,
            sites.installed_at,
            guard.around,
            guard.is_scripts,
            Patches(),
            cuda=cuda,
        )

    def leave_out(self, missed: tuple[str, ...]) -> None:
        """Some kinds of checkpoint are not caught: annotate nothing from here on, nor say what is
        on, and warn why.
        """
        self.remove()
        self._left_out = True
        self._warn(
            f"In this version of torch ({torch.__version__}) recompute-scan cannot see calls of "
            f"some checkpoints: {', '.join(missed)}. So the trace has no annotations: counts come "
            "from the operators, and call sites are unknown."
        )

    def begin(self) -> None:
        """Recording is about to start: learn the modules there are now, and what is on."""
        if self._left_out:
            return
        self._learn()
        with self._guard.part("Modules could not be named"):
            self._index.rebuild()
            self.switched_on = self.switches.still_on()

    def _learn(self) -> None:
        """Watch the autograd functions of the script's making that there are by now."""
        if not self._left_out:
            with self._guard.part("Checkpoint functions of the script are not known"):
                for function in own_functions():
                    if function not in self.comparison.functions:
                        self._watch_function(function, known=False)

    def asker(self, call: CheckpointCall) -> Origin:
        """Module, mechanism and site of a checkpoint call, as annotated."""
        found = [Origin()]
        with self._guard.part(UNNAMED):
            found.append(self._origins.asker(call))
        return found[-1]

    def look_at_gradients(self) -> None:
        """A step has ended: see whether the weights in suspected regions have gradients."""
        with self._guard.part("Gradients could not be seen"), torch._C.DisableTorchFunction():
            self.untrained.look()

    def _watch_reentrant(self) -> bool:
        """Watch torch's reentrant checkpoint; ``False`` where it is not found."""
        function = reentrant_function()
        if getattr(function, "forward", None) is None:
            return False
        self._watch_function(function)
        return True

    def _watch_non_reentrant(self) -> bool:
        """Watch torch's other checkpoint; ``False`` where it is not found."""
        original = generator_function()
        if original is None:
            return False
        arguments = Arguments(original)

        def generator(call: Call, function: Any, *args: Any, **kwargs: Any) -> Any:
            self.entered["non-reentrant"] += 1
            if not self.comparison.wanted:
                return call(function, *args, **kwargs)
            with self.comparison.preparing():
                options = arguments.options((function, *args), kwargs)
                frame, followed = sys._getframe(1), torch.is_grad_enabled()
                this_call = CheckpointCall(
                    "non-reentrant", function, inputs(args), frame, options, differentiated=followed
                )
                region = self.comparison.region(this_call)
                recompute = self._guard.inside(function, region.recompute)
            inner = call(recompute, *args, **kwargs)
            return within(inner, Sheltered(self._guard, region.forward()))

        replace_generator(self._guard.around(original, generator), self.patches)
        return True

    def _watch_function(self, function: Any, *, known: bool = True) -> None:
        """Give a region to what an autograd function of the reentrant kind runs.

        Its forward takes the checkpointed function as the first argument that can be called,
        and keeps it for the recompute. A function of the script may do anything else with it
        too: its replacement there looks like it in every other respect, and a module,
        which is compared, searched and trained, stays.
        """
        original = function.forward
        backward = function.backward
        names = _names(inspect.unwrap(backward), _DEEPEST) if callable(backward) else ()
        sure = known or not _TURNS_ON.isdisjoint(names)
        own = "" if function is reentrant_function() else function.__name__

        def forward(call: Call, ctx: Any, *args: Any, **kwargs: Any) -> Any:
            # Most of this runs in every step, recorded or not: hence no generators, no copies.
            place: int | None = 0
            if not (args and callable(args[0])):
                place = next((n for n, arg in enumerate(args) if callable(arg)), None)
            if place is not None:
                self.entered["reentrant"] += 1
                if not needs_gradient(args):
                    self._suspect(args[place], args[place + 1 :])
                if not (known or isinstance(args[place], _FUNCTIONS)):
                    if sure:
                        self._note(function.__name__, sys._getframe(1))
                    if self.comparison.wanted and isinstance(args[place], nn.Module):
                        applied = Application(ctx, args)
                        with self.comparison.around_module(_reentrant_call(own, applied, place)):
                            return applied.ended(call(ctx, *args, **kwargs))
                elif self.comparison.wanted:
                    with self.comparison.preparing():
                        applied = Application(ctx, args)
                        region = self.comparison.region(_reentrant_call(own, applied, place))
                        runs = _Runs()
                        both = self._both_runs(args[place], region, runs)
                        if not known:
                            both = _disguised(both, args[place])
                    behind = args[place + 1 :]
                    with runs.of_forward():
                        return applied.ended(call(ctx, *args[:place], both, *behind, **kwargs))
            elif sure:
                self._note(function.__name__, sys._getframe(1))
            return call(ctx, *args, **kwargs)

        guarded = self._guard.around(original, forward)
        patches, functions = self.patches if known else self._own, self.comparison.functions
        functions.append(function)
        patches.add(functools.partial(functions.remove, function))
        patches.replace(function, "forward", staticmethod(guarded))

    def _watch_call(self, module: ModuleType, name: str) -> None:
        """Give a region to what a function of the non-reentrant kind runs: its first argument.

        The region is made when that runs first, inside the library's function, so that its
        frame is one that the call site is read from.
        """

        def checkpoint(call: Call, function: Any, *args: Any, **kwargs: Any) -> Any:
            self.entered["non-reentrant"] += 1
            if not self.comparison.wanted:
                return call(function, *args, **kwargs)
            runs = _Runs()
            function = self._region_when_run(name, function, runs)
            with runs.of_forward():
                return call(function, *args, **kwargs)

        self.patches.wrap(self._guard, module, name, checkpoint)

    def _region_when_run(self, library: str, function: Any, runs: _Runs) -> Callable[..., Any]:
        """The function, given a region in its first run."""
        both: Callable[..., Any] | None = None

        def run(call: Call, *args: Any, **kwargs: Any) -> Any:
            nonlocal both
            if both is None:
                with self.comparison.preparing():
                    this_call = CheckpointCall(
                        "non-reentrant",
                        function,
                        args,
                        sys._getframe(1),
                        library=library,
                        differentiated=torch.is_grad_enabled() or needs_gradient(args),
                    )
                    both = self._both_runs(function, self.comparison.region(this_call), runs)
            return call.instead(both, *args, **kwargs)

        return self._guard.around(function, run, named=False)

    def _both_runs(self, function: Any, region: RangedRegion, runs: _Runs) -> Callable[..., Any]:
        """The function: its runs inside the checkpoint function are the forward's, one or, for a
        function that cuts its input into parts, several; its later runs are recomputes.
        """

        def run(call: Call, *args: Any, **kwargs: Any) -> Any:
            given = (*args, kwargs)
            around = region.forward(given) if runs.forward else region.recompute(given)
            with around as returned:
                result = call(*args, **kwargs)
                if returned is not None:
                    returned(result)
                return result

        return self._guard.around(function, run, named=False)

    def _note(self, function: str, frame: FrameType | None) -> None:
        """Note where a function is called that gets no regions, such as a reversible block."""
        if function in self.functions:
            return
        with self._guard.part(UNNAMED):
            self.functions[function] = self.sites.called_at(frame)

    def _suspect(self, function: object, args: tuple[object, ...]) -> None:
        unseen = self._guard.part("Checkpoint inputs could not be seen")
        with unseen, torch._C.DisableTorchFunction():
            self.untrained.entered(function, args)

    def _cannot_watch(self, variant: Variant) -> None:
        self._warn(
            f"This version of torch ({torch.__version__}) has no {variant} checkpoint in the "
            "expected place, so its regions carry no annotations in the trace."
        )

    def _warn(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.append(text)


class _Runs(Struct, eq=False):
    """Whether what a checkpoint function runs now is the forward's."""

    forward: bool = False

    @contextmanager
    def of_forward(self) -> Iterator[None]:
        self.forward = True
        try:
            yield
        finally:
            self.forward = False


def _disguised(function: Callable[..., Any], original: Any) -> Any:
    """The function, which looks like the original in everything but its calls."""

    def called(_: Any, __: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)

    return wrapt.FunctionWrapper(original, called)


def own_functions() -> Iterator[Any]:
    """The classes in this process that define a forward, without torch's."""
    for function in _below(torch.autograd.Function):
        home = str(getattr(function, "__module__", "")).partition(".")[0]
        own = home != "torch" and "forward" in vars(function)
        if own and recomputes(getattr(function, "backward", None)):
            yield function


def recomputes(backward: Any) -> bool:
    """Does the code of a ``backward`` start a backward pass?

    One that runs something again turns gradients on first, unless its author forgot that.
    """
    # torch.amp.custom_bwd and once_differentiable are around many.
    function = inspect.unwrap(backward) if callable(backward) else None
    names = set(_names(function, _DEEPEST))
    # Every tensor has a `grad` too: the function is reached through `autograd`, or imported.
    imported = "grad" in getattr(function, "__globals__", ())
    return "backward" in names or ("grad" in names and ("autograd" in names or imported))


def _below(kind: type) -> Iterator[type]:
    children: list[type] = type.__subclasses__(kind)
    for child in children:
        yield child
        yield from _below(child)


def _reentrant_call(own: str, applied: Application, place: int) -> CheckpointCall:
    """The call of a function that its caller is; ``own`` is the name of one of the script's."""
    args = applied.args
    options = [RANDOM_STATE_LEFT] * (not own and len(args) > 1 and args[1] is False)
    known = own, "", applied if own else None
    # Its own forward runs without autograd; its node knows how it was called.
    differentiated = bool(applied.node.next_functions)
    behind, frame = args[place + 1 :], sys._getframe(2)
    return CheckpointCall("reentrant", args[place], behind, frame, options, *known, differentiated)


def _names(function: object, depth: int) -> Iterator[str]:
    """Names in a function's code, and in the code of functions of its module that it calls."""
    if not isinstance(function, FunctionType):
        return
    for name in named_in(function.__code__):
        yield name
        beside = function.__globals__.get(name)
        if depth and getattr(beside, "__module__", None) == function.__module__:
            yield from _names(beside, depth - 1)


Checkpoint = Callable[[object], Any]


class _Caught(BaseException):
    """The checkpoint has come to where it is caught."""


def install_self_test(probe: Probe) -> None:
    """Install the probe if this torch's checkpoints are caught; else say so in its warnings.

    FSDP's wrapper is tried once the script has imported it.
    """

    def wrapper_imported(module: ModuleType) -> None:
        with probe.switches.aside():  # which are not the script's
            missed = uncaught(_wrappers(module))
        if missed:
            probe.leave_out(missed)

    if missed := uncaught(_direct()):
        probe.leave_out(missed)
        return
    probe.install()
    probe.patches.add(after_import(WRAPPER_MODULE, wrapper_imported))


def uncaught(kinds: dict[str, Checkpoint]) -> tuple[str, ...]:
    """Which of these kinds of checkpoint do not come to where they are caught.

    None, where a profiler of the script's runs: it would see the attempt.

    Args:
        kinds: By name, what calls a checkpoint with the argument that it gets.
    """
    if getattr(torch._C._autograd, "_profiler_enabled", bool)():
        return ()
    return tuple(name for name, checkpoint in kinds.items() if not _is_caught(checkpoint))


def _is_caught(checkpoint: Checkpoint) -> bool:
    ours = object()
    patches = Patches()
    try:
        _wait_for(ours, patches)
        checkpoint(ours)
    except _Caught:
        return True
    except Exception:  # what it wants is not what it is given here, nor what the hooks expect
        return False
    finally:
        patches.undo()
    return False


def _wait_for(ours: object, patches: Patches) -> None:
    """Stop the checkpoint that has this argument; other threads' pass."""
    function, generator = reentrant_function(), generator_function()
    forward = getattr(function, "forward", None)
    if forward is not None:

        @functools.wraps(forward)
        def watched_forward(ctx: Any, *args: Any) -> Any:
            if any(arg is ours for arg in args) and any(map(callable, args)):
                raise _Caught
            return forward(ctx, *args)

        patches.replace(function, "forward", staticmethod(watched_forward))
    if generator is not None:

        @functools.wraps(generator)
        def watched_generator(function: Any, *args: Any, **kwargs: Any) -> Any:
            if any(arg is ours for arg in inputs(args)) and callable(function):
                raise _Caught
            return generator(function, *args, **kwargs)

        replace_generator(watched_generator, patches)


def _direct() -> dict[str, Checkpoint]:
    # Below the decorator that imports the compiler in order to keep it out.
    function: Any = inspect.unwrap(torch_checkpoint.checkpoint)
    return {
        "reentrant": lambda x: function(_nothing, x, use_reentrant=True),
        "non-reentrant": lambda x: function(_nothing, x, use_reentrant=False),
    }


def _wrappers(module: ModuleType) -> dict[str, Checkpoint]:
    return {
        f"FSDP's checkpoint_wrapper, {one.name}": functools.partial(_wrapped, module, one)
        for one in module.CheckpointImpl
    }


def _wrapped(module: ModuleType, implementation: object, x: object) -> None:
    # The class: the function warns of the reentrant kind in 2.6, and the script did not ask.
    wrapper = module.CheckpointWrapper(nn.Identity(), implementation)
    asked = wrapper.checkpoint_fn
    function = inspect.unwrap(asked.func)
    if not str(function.__module__).startswith("torch."):
        raise _Caught  # the script's own is in torch's place, and is not ours to call
    wrapper.checkpoint_fn = functools.partial(function, *asked.args, **asked.keywords)
    wrapper.forward(x)  # a call would run the hooks that the script has for all modules


def _nothing(x: object) -> object:
    return x
