"""Checkpoints in memory as an arrangement has them: the script's own taken out, others put in.

A module gets its checkpoint around ``forward``, as torch's ``checkpoint_wrapper`` puts it, so that
what sharding hangs on the module stays outside. Checkpoints of the script that cover no module of
their own stay where they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from recompute_scan.record.arrange.candidates import Chosen
from recompute_scan.record.arrange.holding import SavedTensors
from recompute_scan.record.caught import Variant
from recompute_scan.record.compat import compiled_something
from recompute_scan.record.guard import Call, Guard
from recompute_scan.record.module_names import covered_modules
from recompute_scan.record.origins import Origin
from recompute_scan.record.patches import Patches
from recompute_scan.record.steps import in_backward
from recompute_scan.record.verify.bypass import Askers, Bypass
from recompute_scan.rehearsal import Way

_PLAIN = "forward"
# Their results are worth keeping: they take long for their size. Products of batches of matrices
# are not among them, because in attention those are as large as the sequence squared.
_HEAVY = (
    "mm",
    "addmm",
    "_scaled_mm",
    "_grouped_mm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)


# From torch 2.4 on.
_selective_contexts: Any = getattr(torch_checkpoint, "create_selective_checkpoint_contexts", None)


def can_be_selective() -> bool:
    """Whether a checkpoint can keep the results of operators here: compiled code runs none."""
    return _selective_contexts is not None and not compiled_something()


def heavy_operators(names: Iterable[str]) -> list[Any]:
    """Those that this torch has, of ``mm`` or ``aten.mm.default``."""
    plain = (name.removeprefix("aten.").removesuffix(".default") for name in names)
    packets: list[Any] = [getattr(torch.ops.aten, name, None) for name in plain]
    return [packet.default for packet in packets if hasattr(packet, "default")]


class _Heavy(TorchDispatchMode):
    """Tells what heavy operators make, and takes those from the list that draw random numbers: a
    recompute that leaves one out would draw others behind it than the forward did.
    """

    def __init__(self, saved: SavedTensors, operators: list[Any], met: dict[str, None]) -> None:
        super().__init__()
        self._saved, self._operators, self._met = saved, operators, met

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in self._operators:
            if draws(func, args, kwargs or {}):
                self._operators.remove(func)
                self._met.pop(str(func), None)
            else:
                self._met[str(func)] = None
                self._saved.keep_results(made)
        return made


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator is called with dropout."""
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p"))


class Arranging(Bypass):
    """Puts an arrangement into effect, from step to step.

    Attributes:
        covered: Modules that the script's own checkpoints cover, until :meth:`take_over`.
        recomputed: Places of the candidates that have a checkpoint, where ``active``.
        selective: Those of them whose checkpoints keep the results of heavy operators.
        offloaded: Places of others whose saved tensors go to the host.
        heavy: Operators whose results selective checkpoints keep.
        met: Those of them that ran in the step that was looked at.
        saved: What looks at the saved tensors of this step, if anything does.
    """

    def __init__(self, askers: Askers, guard: Guard) -> None:
        super().__init__(askers, (), everything=True, guard=guard)
        self.active = False
        self.covered: dict[int, nn.Module] = {}
        self.recomputed: frozenset[int] = frozenset()
        self.selective: frozenset[int] = frozenset()
        self.offloaded: frozenset[int] = frozenset()
        self.heavy = heavy_operators(_HEAVY)
        self.met: dict[str, None] = {}
        self.saved: SavedTensors | None = None
        self._forwards = Patches()
        self._taken_over = False
        self._times: dict[int, list[float]] = {}
        self._events: list[tuple[int, int, Any, Any]] = []
        self._timing: list[tuple[Way, dict[int, float]]] = []
        self._clock = False
        self._runs: list[tuple[int, int, int]] = []

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """Candidate, beginning and run around each run in the step that was looked at."""
        return self._runs

    def take_over(self, chosen: Sequence[Chosen]) -> None:
        """Between steps: from now on these modules can have checkpoints of ours."""
        self._taken_over = True
        for place, one in enumerate(chosen):
            original = one.module.forward
            guarded = self._guard.around(original, self._forward_of(place, one, original))
            self._forwards.replace(one.module, _PLAIN, guarded)

    def remove(self) -> None:
        """Let every module and every checkpoint be what it was."""
        self.active = False
        self._forwards.undo()
        super().remove()

    def look(self, saved: SavedTensors | None) -> None:
        """A step begins of which the saved tensors are looked at, or are not."""
        self.saved = saved
        self._runs = []

    def time_recomputes(self, way: Way | None) -> None:
        """A step begins in which recomputes are timed, of checkpoints of this kind, or are not."""
        self._clock = way is not None
        if way is not None:
            self._timing.append((way, {}))

    def recompute_times(self, way: Way) -> list[dict[int, float]]:
        """Of each such step that was timed, ms of each candidate's recomputes. Waits for the
        GPU.
        """
        if self._events:
            torch.cuda.synchronize()
            for step, place, begin, end in self._events:
                self._add(step, place, float(begin.elapsed_time(end)))
            self._events.clear()
        return [times for known, times in self._timing if known == way]

    def _passes(self) -> bool:
        if self.saved is not None or not self._taken_over:
            return False
        if self.active and getattr(self._thread, "ours", False):
            self._thread.ours = False  # inside it the script's own go
            return True
        return not self.active

    def _takes(self, variant: Variant, asker: Origin) -> bool:
        if getattr(self._thread, "ours", False):
            self._thread.ours = False
            return False
        taken = self.active and getattr(self._thread, "covers", True)
        self.calls += taken
        return taken

    def _asker(
        self, function: object, args: tuple[object, ...], options: Sequence[str] = ()
    ) -> Origin:
        if not getattr(self._thread, "ours", False):
            modules = covered_modules(function, args)
            self._thread.covers = bool(modules)
            if not self.active and not getattr(self._thread, "depth", 0):
                self.covered.update((id(module), module) for module in modules)
        return super()._asker(function, args, options)

    @contextmanager
    def _inside(self, asker: Origin) -> Iterator[None]:
        with super()._inside(asker):
            if self.saved is not None and in_backward():
                with self.saved.recomputing():
                    yield
            else:
                yield

    def _forward_of(self, place: int, one: Chosen, original: Any) -> Any:
        def forward(call: Call, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or in_backward():
                return call(*args, **kwargs)
            if self.active and place in self.recomputed:
                self._thread.ours = True
                try:
                    run = self._timed(place, original)
                    how: dict[str, Any] = {"use_reentrant": False}
                    if place in self.selective:
                        how["context_fn"] = self._contexts
                    return call.instead(checkpoint, run, *args, **how, **kwargs)
                finally:
                    self._thread.ours = False
            if self.active and place in self.offloaded:
                # What is not pinned is copied twice; without a GPU nothing can be.
                with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
                    return call(*args, **kwargs)
            if self.saved is not None:
                return self._looked_at(self.saved, place, one, call, args, kwargs)
            return call(*args, **kwargs)

        return forward

    def _looked_at(
        self,
        saved: SavedTensors,
        place: int,
        one: Chosen,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        before, is_part = saved.current_run, one.part_of >= 0
        run = len(self._runs)
        if is_part and (before < 0 or self._runs[before][0] != one.part_of):
            self._runs.append((place, saved.now, -1))  # somebody else calls it
            return call(*args, **kwargs)
        saved.see_weights(one.module, 1)
        saved.keep_inputs(run, list(_tensors((args, kwargs))))
        self._runs.append((place, saved.now, before if is_part else -1))
        saved.current_run = run
        looks = self.active and can_be_selective() and not is_part
        try:
            with _Heavy(saved, self.heavy, self.met) if looks else nullcontext():
                return call(*args, **kwargs)
        finally:
            saved.current_run = before
            saved.see_weights(one.module, -1)

    def _contexts(self) -> Any:
        return _selective_contexts(self.heavy)

    def _timed(self, place: int, original: Any) -> Any:
        """The function of a checkpoint, whose run in the backward pass is timed.

        It may end with an exception of torch's, once all that is needed is there.
        """
        if not self._clock:
            return original
        step = len(self._timing) - 1

        def run(*args: Any, **kwargs: Any) -> Any:
            if not in_backward():
                return original(*args, **kwargs)
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                try:
                    return original(*args, **kwargs)
                finally:
                    end.record()
                    self._events.append((step, place, begin, end))
            began = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                self._add(step, place, (time.thread_time() - began) * 1e3)

        return run

    def _add(self, step: int, place: int, ms: float) -> None:
        _, times = self._timing[step]
        times[place] = times.get(place, 0.0) + ms


def _tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in arguments, a few containers deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 4 and isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, depth + 1)
