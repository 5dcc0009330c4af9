"""Checkpoints put around modules.

A module gets its checkpoint around ``forward``, as torch's ``checkpoint_wrapper`` puts it, so that
what sharding hangs on the module stays outside. Checkpoints of the script that cover no module of
their own stay where they are.

These modules can get a checkpoint: those that have one, repeated blocks, and the
parts of both, such as a layer's attention and its MLP.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from time import thread_time
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from msgspec import Struct
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from recompute_scan.record.bypass import Bypass
from recompute_scan.record.isolation import Call, Guard, Patches
from recompute_scan.record.modules import (
    ModuleIndex,
    ModuleName,
    covered_modules,
    real_class_name,
    root_modules,
    unwrapped,
)
from recompute_scan.record.origins import CheckpointCall, Origin, Variant
from recompute_scan.record.saved_tensors import SavedTensors
from recompute_scan.record.steps import in_backward
from recompute_scan.record.torch_versions import compiled_something
from recompute_scan.result.run_record import Way

_REPEATED_IN = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_LISTS = (nn.ModuleList, nn.ModuleDict)
# A decoder's layer has attention, attention to the encoder, an MLP. More are no halves.
_MOST_PARTS = 3


class Chosen(Struct, frozen=True):
    """One such module; ``part_of`` is the place of the one that it is a part of, -1 for none."""

    module: nn.Module
    name: str
    class_name: str
    checkpointed: bool
    part_of: int = -1


def candidates(covered: Sequence[nn.Module]) -> tuple[tuple[Chosen, ...], tuple[str, ...]]:
    """The modules, none inside another, then their parts; a sentence for each kind left out.

    Args:
        covered: The modules that the script checkpoints today.
    """
    index = ModuleIndex()
    index.rebuild()
    covered = [unwrapped(module) for module in covered]
    today = set(map(id, covered))
    covers = {id(part) for module in covered for part in module.modules()}
    repeated = [module for root in root_modules() for module in blocks(root)]
    inside = {id(part) for block in repeated for part in block.modules()}
    picked = list(repeated)
    for module in covered:
        inner = set(map(id, module.modules()))
        if id(module) not in inside and not any(id(block) in inner for block in repeated):
            picked.append(module)
    found: list[Chosen] = []
    normed: Counter[str] = Counter()
    for module in dict.fromkeys(picked):
        inner = set(map(id, module.modules()))
        around = id(module) in covers
        kind = real_class_name(module)
        if not inner & today and not around and _updates_buffers(module):
            normed[kind] += 1
            continue
        name = index.look_up([module]).name
        if name:
            whole = bool(inner & today - set(map(id, _parts(module))))
            found.append(Chosen(module, name, kind, whole or around))
    found = of_one_name(found)
    remarks = tuple(
        f"{number} of {kind} keep what they save: batch normalization in them would update its "
        "running statistics once more in every recompute."
        for kind, number in normed.items()
    )
    return (*found, *of_one_name(parts_among(found, today, index.look_up))), remarks


def parts_among(
    found: Sequence[Chosen], today: set[int], look_up: Callable[[list[nn.Module]], ModuleName]
) -> list[Chosen]:
    """The parts of these modules; ``look_up`` gives their names."""
    parts = [(place, part) for place, one in enumerate(found) for part in _parts(one.module)]
    times = Counter(id(part) for _, part in parts)
    return [
        Chosen(part, look_up([part]).name, real_class_name(part), id(part) in today, place)
        for place, part in parts
        if times[id(part)] == 1
    ]


def of_one_name(found: Sequence[Chosen]) -> list[Chosen]:
    """The modules that have a name that no other has."""
    names = Counter(one.name for one in found)
    return [one for one in found if one.name and names[one.name] == 1]


def _parts(module: nn.Module) -> list[nn.Module]:
    """Its parts, where they are a few modules that have parts themselves."""
    found: list[nn.Module] = []
    for child in module._modules.values():
        each = child._modules.values() if isinstance(child, _LISTS) else (child,)
        found += [unwrapped(one) for one in each if one is not None]
    found = [one for one in found if one._modules and any(True for _ in one.parameters())]
    if len(found) == 1:  # around the layer's own, as an adapter is
        found = _parts(found[0]) or found
    return found if len(found) <= _MOST_PARTS else []


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost blocks that a list of the model, or the model itself, has several alike of."""
    parts = [part for part in module._modules.values() if part is not None]
    kinds: Counter[str] = Counter()
    if isinstance(module, _REPEATED_IN):
        kinds.update(real_class_name(unwrapped(part)) for part in parts)
    for part in parts:
        one = unwrapped(part)
        if kinds[real_class_name(one)] > 1 and is_block(one):
            yield one
        else:
            yield from blocks(part)


def is_block(module: nn.Module) -> bool:
    """Is it made of several layers? One alone saves little more than a checkpoint keeps."""
    if isinstance(module, _LISTS):
        return False
    layers = sum(1 for part in module.modules() if not part._modules)
    return layers > 1 and any(True for _ in module.parameters())


def _updates_buffers(module: nn.Module) -> bool:
    return any(
        isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats
        for part in module.modules()
    )


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
    """Notes the results of heavy operators, and drops operators that cannot be left out.

    Those draw random numbers, so that others behind them would be drawn anew, or their results
    are split unsafely, as in cells of recurrent layers: torch does not see that parts of these
    are changed in place, and a recompute would find them changed.
    """

    def __init__(self, saved: SavedTensors, operators: list[Any], met: dict[str, None]) -> None:
        super().__init__()
        self._saved, self._operators, self._met = saved, operators, met
        self._made_by: dict[int, tuple[StorageWeakRef, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in self._operators:
            if draws(func, args, kwargs or {}):
                self._drop(func)
            else:
                self._met[str(func)] = None
                self._saved.keep_results(made)
                for one in tensors_in(made):
                    weak = StorageWeakRef(one.untyped_storage())
                    self._made_by[weak.cdata] = weak, func
        elif func._schema.name.startswith("aten::unsafe_"):
            _, maker = self._made_by.get(args[0].untyped_storage()._cdata, (None, None))
            if maker in self._operators:
                self._drop(maker)
        return made

    def _drop(self, func: Any) -> None:
        self._operators.remove(func)
        self._met.pop(str(func), None)


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator is called with dropout."""
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p"))


class Arranging(Bypass):
    """Puts an arrangement into effect, from step to step.

    Attributes:
        covered: Modules that the script's own checkpoints cover, until :meth:`take_over`.
        recomputed: Places of the candidates that have a checkpoint, where ``active``.
        selective: The recomputed ones that keep the results of heavy operators.
        offloaded: Places of candidates that save their tensors on the host.
        heavy: Operators with results that selective checkpoints keep.
        met: Those of them that ran in the step that was looked at.
        saved: What looks at the saved tensors of this step, if anything does.
        runs: Candidate, beginning and run around each run in the step that was looked at.
    """

    def __init__(self, guard: Guard) -> None:
        super().__init__(guard)
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
        self._events: list[tuple[int, int, Any, Any]] = []
        self._timing: list[tuple[Way, defaultdict[int, float]]] = []
        self._clock = False
        self.runs: list[tuple[int, int, int]] = []

    def take_over(self, chosen: Sequence[Chosen]) -> None:
        """Between steps: from now on these modules can have checkpoints of ours."""
        self._taken_over = True
        for place, one in enumerate(chosen):
            original = one.module.forward
            guarded = self._guard.around(original, self._forward_of(place, one, original))
            self._forwards.replace(one.module, _PLAIN, guarded)

    def remove(self) -> None:
        self.active = False
        self._forwards.undo()
        super().remove()

    def look(self, saved: SavedTensors | None) -> None:
        """A step begins; its saved tensors are looked at, or are not."""
        self.saved = saved
        self.runs = []

    def time_recomputes(self, way: Way | None) -> None:
        """A step begins in which recomputes are timed, of checkpoints of this kind, or are not."""
        self._clock = way is not None
        if way is not None:
            self._timing.append((way, defaultdict(float)))

    def recompute_times(self, way: Way) -> Sequence[Mapping[int, float]]:
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

    def _asker(self, call: CheckpointCall) -> Origin:
        if not getattr(self._thread, "ours", False):
            modules = covered_modules(call.function, call.args)
            self._thread.covers = bool(modules)
            if not self.active and not getattr(self._thread, "depth", 0):
                self.covered.update((id(module), module) for module in modules)
        return super()._asker(call)

    def _forward_of(self, place: int, one: Chosen, original: Any) -> Any:
        def forward(call: Call, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or in_backward():
                return call(*args, **kwargs)
            if self.active and place in self.recomputed:
                self._thread.ours = True
                try:
                    run = self._timed(place, original)
                    if self.saved is not None and self.saved.through:
                        run = self._seen_through(self.saved, place, one, original)
                        self.saved.entering = True
                    how: dict[str, Any] = {"use_reentrant": False}
                    if place in self.selective:
                        how["context_fn"] = self._contexts
                    return call.instead(checkpoint, run, *args, **how, **kwargs)
                finally:
                    self._thread.ours = False
            if self.active and place in self.offloaded:
                # Memory that is not pinned is copied twice; without a GPU nothing can be pinned.
                with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
                    return call(*args, **kwargs)
            if self.saved is not None:
                return self._looked_at(self.saved, place, one, call, args, kwargs)
            return call(*args, **kwargs)

        return forward

    def _seen_through(self, saved: SavedTensors, place: int, one: Chosen, original: Any) -> Any:
        """The function of a checkpoint, looked at in the forward pass as if it had none."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if in_backward():
                return original(*args, **kwargs)
            return self._looked_at(saved, place, one, original, args, kwargs)

        return run

    def _looked_at(
        self,
        saved: SavedTensors,
        place: int,
        one: Chosen,
        call: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        before, is_part = saved.current_run, one.part_of >= 0
        run = len(self.runs)
        if is_part and (before < 0 or self.runs[before][0] != one.part_of):
            self.runs.append((place, saved.now, -1))  # somebody else calls it
            return call(*args, **kwargs)
        saved.see_weights(one.module, 1)
        looks = self.active and can_be_selective() and not is_part
        try:
            with (
                saved.running(run, tensors_in((args, kwargs))),
                _Heavy(saved, self.heavy, self.met) if looks else nullcontext(),
            ):
                self.runs.append((place, saved.now, before if is_part else -1))
                return call(*args, **kwargs)
        finally:
            saved.see_weights(one.module, -1)

    def _contexts(self) -> Any:
        return _selective_contexts(self.heavy)

    def _timed(self, place: int, original: Any) -> Any:
        """The function of a checkpoint; its run in the backward pass is timed.

        It may end with an exception of torch's, once all that is needed is there.
        """
        if not self._clock:
            return original
        step = len(self._timing) - 1

        def run(*args: Any, **kwargs: Any) -> Any:
            if not in_backward():
                return original(*args, **kwargs)
            if torch.cuda.is_initialized():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                try:
                    return original(*args, **kwargs)
                finally:
                    end.record()
                    self._events.append((step, place, begin, end))
            began = thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                self._add(step, place, (thread_time() - began) * 1e3)

        return run

    def _add(self, step: int, place: int, ms: float) -> None:
        self._timing[step][1][place] += ms


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in arguments, a few containers deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 4 and isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item, depth + 1)
