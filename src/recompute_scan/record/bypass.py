"""Takes checkpoints out in memory: their function is called directly, as if never wrapped.

Only calls that go through ``torch.utils.checkpoint`` can be taken out. Other effects of the call
that switched them on (``use_cache``, hooks on the inputs) stay.

Where it can be done from step to step, steps with the fix and without alternate in one process.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
import wrapt
from msgspec.structs import replace

from recompute_scan.record.checkpoint_calls import Probe, recomputes
from recompute_scan.record.isolation import Call, Guard, Patches, Sheltered, within
from recompute_scan.record.options import RemovalOptions
from recompute_scan.record.origins import (
    Arguments,
    CheckpointCall,
    Origin,
    Variant,
    generator_function,
    reentrant_function,
    replace_generator,
)
from recompute_scan.record.recorder import Recorder
from recompute_scan.record.region_ranges import needs_gradient
from recompute_scan.record.torch_versions import inputs
from recompute_scan.result.run_record import step_has_fix

_NOBODY = Origin()


_INSTALLED: weakref.WeakSet[Bypass] = weakref.WeakSet()


def rearranges() -> bool:
    """Whether a recording takes checkpoints out, or puts others in."""
    return any(one.of_recording for one in list(_INSTALLED))


class Bypass:
    """Takes the chosen checkpoints out, from :meth:`install` on.

    Args:
        guard: Separates this from the script.
        removals: The ones to take out.
        probe: Tells the calls apart; without it every checkpoint is taken out.

    Attributes:
        calls: How many checkpoint calls were taken out, those in recomputes of others included.
        active: Whether any is taken out now; to be changed between steps only.
        of_recording: Whether it is a recording's.
    """

    of_recording = True

    def __init__(
        self, guard: Guard, removals: tuple[RemovalOptions, ...] = (), probe: Probe | None = None
    ) -> None:
        self._guard = guard
        self._removals = removals
        self._probe = probe
        self._thread = threading.local()
        self._patches = Patches()
        self.calls = 0
        self.active = True

    def install(self) -> None:
        """Begin; after the probe, so that its annotations show only the checkpoints that stay."""
        _INSTALLED.add(self)
        if reentrant_function() is not None:
            self._catch_reentrant(reentrant_function())
        if generator_function() is not None:
            self._catch_non_reentrant(generator_function())
        weakref.finalize(self, self._patches.undo).atexit = False

    def remove(self) -> None:
        _INSTALLED.discard(self)
        self._patches.undo()

    def _catch_reentrant(self, function: Any) -> None:
        alone = weakref.ref(self)  # what torch holds keeps nothing alive

        def apply(call: Call, run_function: Any, preserve_rng_state: Any, *args: Any) -> Any:
            me = alone()
            if me is None or me._passes():
                return call(run_function, preserve_rng_state, *args)
            asker = me._asker(CheckpointCall("reentrant", run_function, args, sys._getframe(1)))
            if me._takes("reentrant", asker):
                with me._inside(asker):
                    return call.instead(run_function, *args)
            inside = me._guard.inside(run_function, partial(me._inside, asker))
            return call(inside, preserve_rng_state, *args)

        guarded = self._guard.around(function.apply, apply, named=False)
        self._patches.replace(function, "apply", staticmethod(guarded))  # hides the inherited one

    def _catch_non_reentrant(self, original: Any) -> None:
        arguments, alone = Arguments(original), weakref.ref(self)

        def generator(call: Call, function: Any, *args: Any, **kwargs: Any) -> Any:
            me = alone()
            if me is None or me._passes():
                return call(function, *args, **kwargs)
            options = arguments.options((function, *args), kwargs)
            asker = me._asker(
                CheckpointCall("non-reentrant", function, inputs(args), sys._getframe(1), options)
            )
            if me._takes("non-reentrant", asker):
                return me._plain(asker)
            inside = me._guard.inside(function, partial(me._inside, asker))
            inner = call(inside, *args, **kwargs)
            return within(inner, Sheltered(me._guard, me._inside(asker)))

        replace_generator(self._guard.around(original, generator), self._patches)

    def _passes(self) -> bool:
        """Whether a call passes without a look at it."""
        return False

    def _asker(self, call: CheckpointCall) -> Origin:
        """Module, mechanism and site of a call; in a recompute, mechanism and site may come from
        the recomputed checkpoint.
        """
        if self._probe is None:
            return _NOBODY
        found = self._probe.asker(call)
        if not found.site:
            outer: Origin = getattr(self._thread, "asker", found)
            found = replace(outer, module=found.module)
        return found

    def _takes(self, variant: Variant, asker: Origin) -> bool:
        depth = getattr(self._thread, "depth", 0)
        taken = self.active and (
            self._probe is None
            or any(removal.takes(variant, asker, depth) for removal in self._removals)
        )
        self.calls += taken
        return taken

    def _plain(self, asker: Origin) -> Generator[None, None, None]:
        with Sheltered(self._guard, self._inside(asker)):
            yield

    @contextmanager
    def _inside(self, asker: Origin) -> Iterator[None]:
        """One checkpoint deeper, and inside the one of this origin, which its recomputes know too
        where it stays.
        """
        thread = self._thread
        depth, enclosing = getattr(thread, "depth", 0), getattr(thread, "asker", _NOBODY)
        thread.depth, thread.asker = depth + 1, asker
        try:
            yield
        finally:
            thread.depth, thread.asker = depth, enclosing


class Alternation:
    """Switches a bypass on and off at step boundaries, in the same steps on every rank.

    Timed steps are counted from 0, as
    :func:`recompute_scan.result.run_record.step_has_fix` wants them. The
    warm-up has negative numbers, so that both ways have been seen before any is timed; behind the
    timed steps, or where a rank cannot go on timing, the count goes on.
    """

    def __init__(self, bypass: Bypass, recorder: Recorder, warmup: int) -> None:
        self._bypass = bypass
        self._recorder = recorder
        self._number = -warmup
        self._bypass.active = step_has_fix(self._number)

    def settle(self) -> None:
        """A step has ended: let the GPU end it too.

        Where the host runs ahead of it, what it gained in a step of the one way would shorten one
        of the other.
        """
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def next(self) -> None:
        timed = self._recorder.timed
        self._number = self._number + 1 if timed is None else timed
        self._bypass.active = step_has_fix(self._number)


class PlainFunctions:
    """Autograd functions of the script's that run something again in their backward, without that:
    what their forward computes is differentiated by autograd.

    Attributes:
        names: Names of the functions that could be run so.
    """

    def __init__(self, bypass: Bypass, guard: Guard) -> None:
        self._bypass = bypass
        self._guard = guard
        self._patches = Patches()
        self._thread = threading.local()
        self._taken: dict[str, bool] = {}

    @property
    def whole(self) -> bool:
        """Whether all of them that were called ran plainly, connected to their inputs."""
        return all(self._taken.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, whole in self._taken.items() if whole)

    def install(self) -> None:
        """Begin; before the script is imported."""
        original = vars(torch.autograd.Function).get("apply")
        if not isinstance(original, classmethod):
            return  # a torch that has it elsewhere: they stay as they are

        def apply_of(kind: Any, *args: Any, **kwargs: Any) -> Any:
            return original.__get__(None, kind)(*args, **kwargs)

        def apply(call: Call, kind: Any, *args: Any, **kwargs: Any) -> Any:
            given = any(callable(one) for one in args)
            if kwargs or not given or not torch.is_grad_enabled() or not runs_again(kind):
                return call(kind, *args, **kwargs)
            return call.instead(self._plainly, kind, args)

        guarded = self._guard.around(apply_of, apply, named=False)
        self._patches.replace(torch.autograd.Function, "apply", classmethod(guarded))
        for owner, name in ((torch.no_grad, "__enter__"), (torch.set_grad_enabled, "__init__")):
            self._patches.wrap(self._guard, owner, name, self._stay_on)

    def remove(self) -> None:
        self._patches.undo()

    def _stay_on(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Keep gradients on in the forward of such a function, whatever switches them off."""
        result = call(*args, **kwargs)
        if getattr(self._thread, "inside", False):
            torch._C._set_grad_enabled(True)
        return result

    def _plainly(self, kind: Any, args: tuple[Any, ...]) -> Any:
        def run(function: Any, _: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            inside, self._thread.inside = self._thread.inside, False
            whole = not needs_gradient(args) or needs_gradient((*given, *named.values()))
            self._taken[kind.__name__] = self._taken.get(kind.__name__, True) and whole
            try:
                with torch.enable_grad():
                    return function(*given, **named)
            finally:
                self._thread.inside = inside

        context: Any = torch.autograd.function.FunctionCtx()
        context.needs_input_grad = tuple(needs_gradient((one,)) for one in args)
        wrapped = [wrapt.FunctionWrapper(one, run) if callable(one) else one for one in args]
        before, self._thread.inside = getattr(self._thread, "inside", False), True
        self._bypass.calls += 1
        try:
            return kind.forward(context, *wrapped)
        finally:
            self._thread.inside = before


@lru_cache(maxsize=1024)
def runs_again(kind: Any) -> bool:
    """Whether it is a function of the script that runs a forward again in its backward."""
    home = str(kind.__module__).partition(".")[0]
    split = kind.setup_context is not torch.autograd.Function.setup_context
    return home != "torch" and not split and recomputes(kind.backward)
