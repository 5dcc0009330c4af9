"""Layers that can be kept or recomputed, switched between two steps of a live training.

A layer gets another ``forward``, a bound method as the class has one: a deep copy of the model has
its own, bound to the copy, which runs plainly; a pickle names it, and loads as the class's. State
dicts and names of modules stay what they are.

A recompute has to see what its forward saw. torch restores its random states. Buffers, attributes
and the generators of Python and NumPy that a forward changes are found in the layer's first call,
where all of them are copied first; from then on those that change are copied before the forward,
put back for the recompute, and restored behind it. So batch normalization counts a batch once.
"""

from __future__ import annotations

import copy
import functools
import inspect
import random
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from recompute_scan.cost.arrangement import KEEP, OFFLOAD, PART, RECOMPUTE, SELECTIVE
from recompute_scan.record.arrange import (
    Arranging,
    Chosen,
    blocks,
    is_block,
    of_one_name,
    parts_among,
    tensors_in,
)
from recompute_scan.record.isolation import Call, Guard, Sheltered
from recompute_scan.record.modules import (
    ModuleName,
    covered_modules,
    plain_name,
    real_class_name,
    unwrapped,
)
from recompute_scan.record.origins import CheckpointCall, Origin, Variant
from recompute_scan.record.saved_tensors import SavedTensors
from recompute_scan.record.steps import in_backward, is_capturing
from recompute_scan.record.torch_versions import is_compiling
from recompute_scan.result.run_record import usual_ms

if TYPE_CHECKING:
    from recompute_scan.fitting.control import Fitted

_FORWARD, _COMPILED, _OWN = "forward", "_compiled_call_impl", "_recompute_scan_forward"
_TORCHS = frozenset(vars(nn.Module())) | {_FORWARD, _OWN, _COMPILED}
_PLAIN = (int, float, bool, str, type(None))
_HELD = (list, dict, set, deque)
# Larger tensors are tables and masks, which no forward changes.
_LARGEST = 2**20
_ABSENT = object()
# Whether a checkpoint that begins now is ours, whatever model it is of: from our call of it until
# its function runs.
_THREAD = threading.local()


def find_layers(model: nn.Module) -> tuple[Chosen, ...]:
    """The layers, none inside another, then their parts.

    Layers are blocks of several modules that a list has more than once, and where a part of the
    model has no such lists, its largest blocks.
    """
    names = {id(module): plain_name(name) for name, module in model.named_modules()}
    compiled = {
        id(inner): one
        for one in model.modules()
        if (inner := one._modules.get("_orig_mod")) is not None
    }

    def look_up(modules: list[nn.Module]) -> ModuleName:
        return ModuleName(names.get(id(modules[0]), ""), real_class_name(modules[0]))

    found = of_one_name(
        [
            Chosen(compiled.get(id(one), one), names.get(id(one), ""), real_class_name(one), True)
            for one in dict.fromkeys(_outermost(model))
        ]
    )
    if any(vars(one.module).get(_COMPILED) is not None for one in found) or compiled:
        return tuple(found)  # in compiled code each part would be a separate graph
    return (*found, *of_one_name(parts_among(found, set(), look_up)))


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    repeated = {id(one) for one in blocks(module)}
    for part in module._modules.values():
        one = None if part is None else unwrapped(part)
        if part is None or one is None:
            continue
        if id(one) in repeated:
            yield one
        elif inner := list(_outermost(part)):
            yield from inner
        elif is_block(one) and not isinstance(one, torch.jit.ScriptModule):
            yield one


class Layer:
    """One layer, or a part of one.

    Attributes:
        choice: What happens to it.
        fast: It is kept, and its calls need no look from us.
        leads: Its calls show how large a step is: it is the first of its list.
        calls: How often it was called in this step.
        known: Shapes of a call that the arrangement is for.
        most: Calls in a step that it is for.
        probed: Its first call has shown what it changes.
        ran: It was called with gradients on.
        cells: Where it keeps what its forward changes.
        draws: It draws random numbers.
        fixed: It cannot be recomputed: it changes its inputs, or the script checkpoints it.
        theirs: The script checkpoints it, or a part of it.
        untrained: Nothing was recomputed of it, because its results needed no gradient.
    """

    def __init__(self, place: int, chosen: Chosen) -> None:
        self.place, self.chosen, self.module = place, chosen, chosen.module
        self.is_part = chosen.part_of >= 0
        self.choice = KEEP if self.is_part else RECOMPUTE
        self.fast = self.leads = self.probed = self.ran = False
        self.draws = self.fixed = self.theirs = self.untrained = False
        self.calls = self.most = 0
        self.known: tuple[tuple[int, ...], ...] = ()
        self.cells: list[tuple[Any, Any]] = []
        self.original: Callable[..., Any] = chosen.module.forward


class Look(SavedTensors):
    """The saved tensors of one step; a bug of ours shows in ``fault`` and nowhere else."""

    fault: Exception | None = None

    def _hold(self, *args: Any, **kwargs: Any) -> Any:
        return self._or_fault(super()._hold, *args, **kwargs)

    def _passes(self, *args: Any, **kwargs: Any) -> Any:
        return self._or_fault(super()._passes, *args, **kwargs)

    def _made_again(self, tensor: torch.Tensor) -> Any:
        return self._or_fault(super()._made_again, tensor)

    def _or_fault(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # the script's operator goes on
            self.fault = error
            return None


class _Generators:
    """The global generators of Python and NumPy, as a holder of two values."""

    def get(self, key: str, default: object = None) -> Any:
        if key == "random":
            return random.getstate()
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return default
        name, keys, *rest = numpy.random.get_state()
        return (name, keys.tobytes(), *rest)

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "random":
            random.setstate(value)
        elif value is not None:
            numpy: Any = sys.modules["numpy"]
            name, keys, *rest = value
            numpy.random.set_state((name, numpy.frombuffer(keys, numpy.uint32), *rest))

    def pop(self, key: str, default: object = None) -> None:
        """Nothing that was there goes."""


_GENERATORS = _Generators()
_Copies = list[tuple[Any, Any, Any, Any]]


def _cells_of(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Where it may keep something: a holder and a key, each."""
    yield from ((_GENERATORS, key) for key in ("random", "numpy"))
    sharded = any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules())
    for part in module.modules():
        yield from ((part._buffers, key) for key in part._buffers)
        if not sharded:  # else attributes come and go with the weights
            yield from ((vars(part), key) for key in vars(part) if key not in _TORCHS)


def _copies(cells: Iterable[tuple[Any, Any]]) -> _Copies:
    """Of each: holder, key, what it holds, a copy of that."""
    found = []
    for holder, key in cells:
        value = holder.get(key, _ABSENT)
        kept = value
        if isinstance(value, torch.Tensor):
            if value.numel() <= _LARGEST and not isinstance(value, nn.Parameter):
                kept = value if value.requires_grad else value.detach().clone()
        elif type(value) in _HELD:
            kept = copy.copy(value)
        found.append((holder, key, value, kept))
    return found


def _differs(now: Any, before: Any, kept: Any) -> bool:
    if now is not before:
        plain = type(now) in _PLAIN or isinstance(now, tuple)
        return type(now) is not type(before) or not plain or now != before
    if isinstance(now, torch.Tensor) and kept is not now:
        return not torch.equal(now, kept)
    if type(now) in _HELD and kept is not now:
        each = [one.items() if isinstance(one, dict) else one for one in (now, kept)]
        flat = [
            [id(part) for item in one for part in (item if isinstance(item, tuple) else (item,))]
            for one in each
        ]
        return flat[0] != flat[1]
    return False


@contextmanager
def _as_before(copies: _Copies) -> Iterator[None]:
    """The state that a layer's forward found, kept for a recompute."""
    now = [(holder, key, holder.get(key, _ABSENT)) for holder, key, *_ in copies]
    for holder, key, _, kept in copies:
        again = kept
        if isinstance(kept, torch.Tensor) and not kept.requires_grad:
            again = kept.clone()
        _put(holder, key, copy.copy(kept) if type(kept) in _HELD else again)
    try:
        yield
    finally:
        for holder, key, value in now:
            _put(holder, key, value)


def _put(holder: Any, key: Any, value: Any) -> None:
    if value is _ABSENT:
        holder.pop(key, None)
    else:
        holder[key] = value


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch raised it for want of memory, on a GPU or of the host's."""
    text = str(error)
    return isinstance(error, torch.cuda.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in text
    )


def without_empty_cache(value: Any) -> Any:
    """``None`` in place of an empty cache of keys and values, as transformers gives a layer that is
    checkpointed; the layer would fill it once more in every recompute.
    """
    if hasattr(value, "get_seq_length") and hasattr(value, "update"):
        with suppress(Exception):
            return value if value.get_seq_length() else None
    return value


class Switch(Arranging):
    """The layers' forwards, replaced from :meth:`put_on` on until :meth:`remove`.

    Attributes:
        layers: The layers, then their parts.
        theirs: Names of layers that the script checkpoints; found in the first step.
        laps: Where runs are timed, if they are.
    """

    of_recording = False

    def __init__(self, chosen: Iterable[Chosen], control: Fitted, guard: Guard) -> None:
        super().__init__(guard)
        self.layers = [Layer(place, one) for place, one in enumerate(chosen)]
        self.laps: Laps | None = None
        self.replace = False
        self.active = True
        self._control = control
        self._layers_around = {
            id(part): layer
            for layer in reversed(self.layers)
            for part in unwrapped(layer.module).modules()
        }
        lists = Counter[str]()
        for layer in self.layers:
            stem = layer.chosen.name.rpartition(".")[0] or layer.chosen.name
            layer.leads = not layer.is_part and not lists[stem]
            lists[stem] += not layer.is_part

    @property
    def wholes(self) -> list[int]:
        """The identities of the layers without their parts."""
        return [id(one.module) for one in self.layers if not one.is_part]

    @property
    def theirs(self) -> list[str]:
        return [one.chosen.name for one in self.layers if one.theirs and not one.is_part]

    def put_on(self) -> None:
        """Replace the forwards of all layers."""
        for layer in self.layers:
            compiled = vars(layer.module).get(_COMPILED) is not None
            self._put_on(layer, _COMPILED if compiled else _FORWARD)

    def put_on_compiled(self) -> None:
        """Those too that were compiled after :meth:`put_on`: a checkpoint goes around them."""
        for layer in self.layers:
            if not layer.ran and vars(layer.module).get(_COMPILED) is not None:
                self._put_on(layer, _COMPILED)

    def arrange(self, choices: Iterable[int], *, settled: bool) -> None:
        """From here on each layer is kept or recomputed so; parts only with ``PART``."""
        for layer, choice in zip(self.layers, choices, strict=True):
            layer.choice = KEEP if layer.fixed or (layer.is_part and choice != PART) else choice
            calm = layer.probed and not layer.draws and not layer.untrained
            layer.fast = settled and layer.choice == KEEP and (layer.is_part or calm)

    def detached(self) -> None:
        """Let the script's checkpoints be, now that they are known."""
        self._patches.undo()

    def remove(self) -> None:
        for layer in self.layers:
            layer.fast = layer.leads = False
        super().remove()

    def _passes(self) -> bool:
        return not self.active or bool(getattr(_THREAD, "ours", False))

    def _takes(self, variant: Variant, asker: Origin) -> bool:
        return self.replace and bool(getattr(self._thread, "mine", False))

    def _asker(self, call: CheckpointCall) -> Origin:
        covered = covered_modules(call.function, call.args)
        around = (part for one in covered for part in one.modules())
        mine = [self._layers_around[id(part)] for part in around if id(part) in self._layers_around]
        for layer in mine:
            layer.theirs |= not self.replace
            layer.fixed |= layer.theirs
        self._thread.mine = bool(mine)
        if mine:
            self._control.met()
        return Origin()

    def _put_on(self, layer: Layer, name: str) -> None:
        module, own = layer.module, vars(layer.module).get(name)
        plain: Any = own if own is not None else getattr(type(module), name)
        original = layer.original = own if own is not None else MethodType(plain, module)
        guarded = self._guard.around(original, functools.partial(self._run, layer), named=False)
        control, retries = self._control, self._retries

        def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self is not module:  # a copy
                mine = vars(self).get(_OWN)
                return plain(self, *args, **kwargs) if mine is None else mine(*args, **kwargs)
            if is_compiling():
                return original(*args, **kwargs)
            if layer.leads and torch.is_grad_enabled() and not in_backward():
                control.enter(layer, args, kwargs)
            if layer.fast:
                try:
                    return original(*args, **kwargs)
                except RuntimeError as error:
                    if not retries(layer, error):
                        raise
            return guarded(*args, **kwargs)

        with suppress(ValueError, TypeError):
            functools.update_wrapper(forward, plain)
            if own is not None:
                known = inspect.signature(own)
                me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
                forward.__signature__ = known.replace(  # type: ignore[attr-defined]
                    parameters=[me, *known.parameters.values()]
                )
        forward.__name__ = name  # by which a pickle finds the class's
        if own is not None and name == _FORWARD:
            self._forwards.replace(module, _OWN, own)
        bound = MethodType(forward, module)
        self._forwards.replace(module, name, bound)

    def _run(self, layer: Layer, call: Call, *args: Any, **kwargs: Any) -> Any:
        seen = next(tensors_in((args, kwargs)), None)
        if (
            not (self.active and torch.is_grad_enabled())
            or in_backward()
            or seen is None
            or is_capturing()
            or torch._C._get_tracing_state() is not None
        ):
            return call(*args, **kwargs)
        layer.ran = True
        if getattr(self._thread, "depth", 0) and not self.replace:
            layer.fixed = layer.theirs = True
        if not layer.is_part:
            args = tuple(map(without_empty_cache, args))
            kwargs = {key: without_empty_cache(value) for key, value in kwargs.items()}
            # A cache with something in it is the script's, and is filled once.
            if any(hasattr(one, "get_seq_length") for one in (*args, *kwargs.values())):
                return call(*args, **kwargs)
        choice = KEEP if layer.fixed else layer.choice
        if choice == OFFLOAD:
            with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
                return call(*args, **kwargs)
        if choice != KEEP:
            return self._checkpointed(layer, call, seen, args, kwargs)
        return self._kept(layer, call, seen, args, kwargs)

    def _kept(self, layer: Layer, call: Call, seen: Any, args: Any, kwargs: Any) -> Any:
        if self.saved is not None:
            return self._looked_at(self.saved, layer.place, layer.chosen, call, args, kwargs)
        before = _random_states(seen) if layer.draws else []
        try:
            with self._lap(layer, "kept"):
                found = call(*args, **kwargs)
        except RuntimeError as error:
            if not self._retries(layer, error):
                raise
        else:
            if layer.untrained and any(one.requires_grad for one in tensors_in(found)):
                self._guard.run(lambda: self._control.surprised(layer), otherwise=None)
            return found
        call.made, call.error = False, None
        for put, state in before:
            put(state)
        return self._checkpointed(layer, call, seen, args, kwargs)

    def _retries(self, layer: Layer, error: RuntimeError) -> bool:
        """Whether a kept layer that failed for want of memory can run again, with a checkpoint."""
        if not is_out_of_memory(error):
            return False
        trained = torch.is_grad_enabled() and not in_backward()
        self._guard.run(lambda: self._control.ran_out(layer), otherwise=None)
        return trained and self.active and layer.probed and not (layer.cells or layer.fixed)

    def _checkpointed(self, layer: Layer, call: Call, seen: Any, args: Any, kwargs: Any) -> Any:
        first = not layer.probed
        nothing: _Copies = []
        copies = self._guard.run(
            lambda: _copies(_cells_of(layer.module) if first else layer.cells), otherwise=nothing
        )
        again_args, again_named = tree_map(_alike, (args, kwargs)) if first else (args, kwargs)
        given = [(args, kwargs)] if first else []
        original, laps, saved = layer.original, self.laps, self.saved

        def run(_: Any, *mine: Any) -> Any:
            _THREAD.ours = False
            if in_backward():
                state = Sheltered(self._guard, _as_before(copies)) if copies else nullcontext()
                with state, self._lap(layer, "again", laps):
                    return original(*mine, **again_named)
            with self._lap(layer, "inner", laps):
                if given:
                    return self._probed(layer, copies, *given.pop())
                if saved is not None:
                    return self._looked_at(
                        saved, layer.place, layer.chosen, original, mine, again_named
                    )
                return original(*mine, **again_named)

        how: dict[str, Any] = {"use_reentrant": False}
        if layer.choice == SELECTIVE:
            how["context_fn"] = self._contexts
        if saved is not None:
            saved.entering = True
        _THREAD.ours = True
        try:
            with self._lap(layer, "whole"):
                # torch keeps the random states of the devices of tensors among these.
                placed = any(isinstance(one, torch.Tensor) for one in args)
                device = None if placed else seen.detach()
                return call.instead(checkpoint, run, device, *again_args, **how)
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._guard.run(lambda: self._control.ran_out(layer), otherwise=None)
            raise
        finally:
            _THREAD.ours = False

    def _probed(self, layer: Layer, copies: _Copies, args: Any, kwargs: Any) -> Any:
        """The first call, which shows what the layer changes; ``copies`` then has that alone."""
        given = list(tensors_in((args, kwargs)))
        versions = [_version(one) for one in given]
        states = _random_states(given[0])
        found = layer.original(*args, **kwargs)

        def learn() -> None:
            known = {(id(holder), key) for holder, key, *_ in copies}
            new = [(h, k) for h, k in _cells_of(layer.module) if (id(h), k) not in known]
            copies[:] = [
                one for one in copies if _differs(one[0].get(one[1], _ABSENT), one[2], one[3])
            ] + [(holder, key, _ABSENT, _ABSENT) for holder, key in new]
            layer.cells = [(holder, key) for holder, key, *_ in copies]
            layer.draws = any(
                not torch.equal(state, now)
                for (_, state), (_, now) in zip(states, _random_states(given[0]), strict=True)
            )
            layer.fixed |= versions != [_version(one) for one in given]
            layer.probed = True

        self._guard.run(learn, otherwise=None)
        return found

    def _contexts(self) -> Any:
        """torch's, where a result that was changed in place is computed again."""
        keeping, using = super()._contexts()
        return keeping, _forgiving(using)

    def _lap(self, layer: Layer, what: str, laps: Laps | None = None) -> Any:
        laps = self.laps or laps
        return nullcontext() if laps is None else laps.lap(layer.place, what)


def _forgiving(using: Any) -> Any:
    kind = type(using)

    class Forgiving(kind):  # type: ignore[misc,valid-type]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
            return func(*args, **(kwargs or {}))

    using.__class__ = Forgiving
    return using


def _alike(value: Any) -> Any:
    """A copy of an input that a layer might change in place, for a recompute; else itself."""
    if type(value) is not torch.Tensor or not value.is_floating_point() or not value.numel():
        return value
    if 0 in value.stride() or value.layout != torch.strided:
        return value
    return value.clone()


def _version(tensor: torch.Tensor) -> int:
    with suppress(RuntimeError):  # an inference tensor has none
        return tensor._version
    return 0


def _random_states(seen: torch.Tensor) -> list[tuple[Callable[[Any], None], torch.Tensor]]:
    """How to put back the random states of the CPU and of a tensor's GPU, and those states."""
    found: list[tuple[Callable[[Any], None], torch.Tensor]] = [
        (torch.set_rng_state, torch.get_rng_state())
    ]
    if seen.is_cuda:
        put = functools.partial(torch.cuda.set_rng_state, device=seen.device)
        found.append((put, torch.cuda.get_rng_state(seen.device)))
    return found


# The key of whole steps among times by layer and kind.
STEP = -1, "step"


class Laps:
    """Times by layer and kind, summed up in each step: by events on a GPU, else by the clock.

    On a CPU with one thread it is the time that this thread had the processor for, which other work
    on the machine does not lengthen.

    Kinds are ``whole`` (a checkpointed call), ``inner`` (the forward in it), ``again`` (its
    recompute) and ``kept``; a step has the layer -1.
    """

    def __init__(self, *, cuda: bool) -> None:
        self._cuda = cuda
        self._laps: list[tuple[int, int, str, Any, Any]] = []
        self._step = 0
        self._began = self._now()

    def next_step(self) -> None:
        """A step has ended."""
        now = self._now()
        self._laps.append((self._step, *STEP, self._began, now))
        self._step, self._began = self._step + 1, now

    @contextmanager
    def lap(self, place: int, kind: str) -> Iterator[None]:
        """A layer runs in the ``with`` block."""
        step, began = self._step, self._now()
        try:
            yield
        finally:
            self._laps.append((step, place, kind, began, self._now()))

    def usual(self) -> dict[tuple[int, str], float]:
        """The usual ms per step by layer and kind, waiting for the GPU.

        The first step finds the memory as another arrangement has left it, and does not count.
        """
        sums: dict[tuple[int, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
        if self._cuda:
            torch.cuda.synchronize()
        for step, place, kind, began, ended in self._laps:
            if 0 < step < self._step:
                took = began.elapsed_time(ended) if self._cuda else (ended - began) * 1e3
                sums[place, kind][step] += float(took)
        return {key: usual_ms(list(steps.values())) for key, steps in sums.items()}

    def _now(self) -> Any:
        if self._cuda:
            event: Any = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
