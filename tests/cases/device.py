"""A device that is not the CPU, on a machine that has none: torch's PrivateUse1, in Python.

Its tensors are torch's own, with storages of their own on the device ``rig``; the memory behind
them is the CPU's, and the CPU's kernels compute on it, unseen by the profiler. What matters is what
torch itself does around it, as on any device that is not the CPU: the autograd engine starts a
thread for the device, and the backward pass runs there, with its hooks, its nested backward passes,
its own sequence numbers and the thread ids of the forward pass.

There is one such device: the guard that torch has for a backend in Python says so
(``torch/csrc/acc/Module.cpp``, ``deviceCount``). There are no streams and no device events.

The engine counts devices when the first backward pass of a process begins, so ``install`` has to
come before. It is for processes of their own (``python -m benchmarks accuracy --device rig``).
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils import backend_registration as registration

NAME = "rig"
LAUNCH = "rig::launch"
"""The range in which an operator would launch its kernels, where these are asked for."""
FEWEST = (2, 13)
"""The torch version that has what this needs."""
UNABLE = frozenset(
    {
        *("discarded_mlp", "discarded_mlp_some"),
        *("cold", "cold_in_r", "cold_in_n", "cold_round_r", "cold_round_n", "cold_twice"),
        "in_two_round_cold",
    }
)
"""Cases that give a storage's memory back, as no backend in Python can resize one, and cases whose
first run is in inference mode, where attention is another here than under autograd."""

aten = torch.ops.aten
_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

# Their CPU kernels make another tensor of the same storage, whatever its device.
_VIEWS = ("as_strided", "view", "_reshape_alias", "unfold")
# Their CPU kernels only look at sizes.
_SETS = ("set_.source_Storage_storage_offset", "set_.source_Tensor", "set_.source_Storage")

# Where a storage of the device keeps the memory behind it.
_MEMORY = "held"

_libraries: list[torch.library.Library] = []
_busy = threading.local()
_options = {"launches": False}


def install(*, launches: bool = False) -> torch.device:
    """Register the device, once in a process; before its first backward pass.

    With ``launches`` each operator records where it would launch kernels.
    """
    _options["launches"] = launches
    if not _libraries:
        registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
        _register()
    return torch.device(NAME, 0)


class _Module(registration._DummyBackendModule):
    """What ``torch.rig`` offers, for those who ask an accelerator's module."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        """The CPU's: its generator is the one that is drawn from."""
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        """Set it."""
        torch.set_rng_state(state)

    def synchronize(self, device: Any = None) -> None:
        """Nothing to wait for."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """As on the CPU."""
        return [torch.bfloat16, torch.float16]

    @contextmanager
    def device(self, device: Any = None) -> Iterator[None]:
        """There is only one."""
        yield


def _register() -> None:
    library = torch.library.Library("aten", "IMPL")
    for name in (*_VIEWS, *_SETS):
        library.impl(name, _redispatched(name), "PrivateUse1")
    for name, kernel in _OWN.items():
        library.impl(name, kernel, "PrivateUse1")
    library.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    for name in _LOWER_PRECISION:
        library.impl(name, _cast(name), "AutocastPrivateUse1")
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_compute, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for operator in _kernels():
        everything_of = functools.partial(_compute, operator)
        library.impl(operator.name(), everything_of, "PrivateUse1")
    _libraries.extend((library, everything))


def _kernels() -> Iterator[torch._ops.OpOverload]:
    """Operators that a device has a kernel of its own for, and no composition of others."""
    given = {"aten::" + name for name in (*_VIEWS, *_SETS, *_OWN)}
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or name in given:
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
            found = getattr(aten, packet, None)
            if found is not None and (overload or "default") in found.overloads():
                yield getattr(found, overload or "default")


def _redispatched(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(aten, packet), overload or "default")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return operator.redispatch(_ON_CPU, *args, **kwargs)

    return kernel


@contextmanager
def _unseen(*, kernel: bool = True) -> Iterator[None]:
    """What the CPU computes for the device is in no trace."""
    deep = getattr(_busy, "deep", 0)
    _busy.deep = deep + 1
    if not deep and _options["launches"] and kernel:
        with torch._C._profiler._RecordFunctionFast(LAUNCH):
            pass
    if not deep:
        torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        _busy.deep = deep
        if not deep:
            torch._C._autograd._enable_record_function(True)


def _put(held: Tensor) -> Tensor:
    """A tensor of the device over the memory of this CPU tensor."""
    memory = held.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), torch.device(NAME, 0), memory.nbytes()
    )
    setattr(
        storage, _MEMORY, memory
    )  # lives as long as the storage: torch keeps a storage's object
    tensor = torch._C._acc.create_empty_tensor((0,), held.dtype)
    aten.set_.source_Storage_storage_offset.redispatch(
        _ON_CPU, tensor, storage, held.storage_offset(), held.shape, held.stride()
    )
    return tensor


def _get(tensor: Tensor) -> Tensor:
    """The CPU's view of a tensor of the device."""
    empty = torch.empty(0, dtype=tensor.dtype)
    memory = getattr(tensor.untyped_storage(), _MEMORY, None)
    if memory is None:
        return empty.reshape(tensor.shape)
    return empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def _is_ours(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _to_cpu(value: Any) -> Any:
    if _is_ours(value):
        return _get(value)
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value


def _compute(operator: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Any operator: computed by the CPU, on the memory of its arguments."""
    with _unseen(), torch._C._AutoDispatchBelowAutograd():
        flat, shape = _pytree.tree_flatten((args, kwargs))
        moved = [_to_cpu(value) for value in flat]
        given = {id(new): old for old, new in zip(flat, moved, strict=True) if _is_ours(old)}
        inputs, named = _pytree.tree_unflatten(moved, shape)
        # A number in a tensor's place comes as itself; only the overload for numbers takes it.
        plain = any(
            isinstance(value, (int, float)) and str(argument.type) == "Tensor"
            for argument, value in zip(operator._schema.arguments, inputs, strict=False)
        )
        results = (operator.overloadpacket if plain else operator)(*inputs, **named)

        def back(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return given[id(value)] if id(value) in given else _put(value)

        for new, old in zip(moved, flat, strict=True):
            if _is_ours(old) and new.shape != old.shape:
                _follow(old, new)
        return _pytree.tree_map(back, results)


def _follow(old: Tensor, new: Tensor) -> None:
    """An operator with an output argument gave it a new size."""
    memory = new.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), torch.device(NAME, 0), memory.nbytes()
    )
    setattr(storage, _MEMORY, memory)
    aten.set_.source_Storage_storage_offset.redispatch(
        _ON_CPU, old, storage, new.storage_offset(), new.shape, new.stride()
    )


def _empty(
    size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None, memory_format: Any = None,
) -> Tensor:  # fmt: skip
    with _unseen(kernel=False):
        return _put(
            torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)
        )


def _empty_strided(
    size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
) -> Tensor:  # fmt: skip
    with _unseen(kernel=False):
        return _put(torch.empty_strided(size, stride, dtype=dtype))


def _copy(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    with _unseen():
        _to_cpu(self).copy_(_to_cpu(src))
    return self


def _copy_from(self: Tensor, dst: Tensor, non_blocking: bool = False) -> Tensor:
    _copy(dst, self)
    return dst


def _item(self: Tensor) -> Any:
    with _unseen(kernel=False):
        return _get(self).item()


def _histc(self: Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> Tensor:
    """A GPU counts integers too, as Mixtral has it count; the CPU does not."""
    with _unseen():
        counted = torch.histc(_get(self).float(), bins, min, max).to(self.dtype)
    return _put(counted)


def _convolve(*args: Any) -> Tensor:
    result: Tensor = _compute(aten.convolution.default, *args)
    return result


def _convolve_back(
    grad: Tensor, value: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, output_mask: Any,
) -> Any:  # fmt: skip
    bias = [weight.size(0)]
    rest = (stride, padding, dilation, transposed, output_padding, groups, output_mask)
    return _compute(aten.convolution_backward.default, grad, value, weight, bias, *rest)


def _resize(self: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    with _unseen(kernel=False):
        if tuple(self.shape) != tuple(size):
            _follow(self, torch.empty(size, dtype=self.dtype))
    return self


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The CPU's fused attention; torch itself would take it apart on a device that it lacks.

    Values of another width than keys are taken apart, too. A mask gets no gradient.
    """
    fused = torch.backends.cuda.flash_sdp_enabled() and query.size(-1) == value.size(-1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        blocked = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = blocked.masked_fill(~attn_mask, float("-inf"))
    if dropout_p or not fused:
        result: Tensor = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return result
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    flash: Callable[..., tuple[Tensor, Tensor]] = aten._scaled_dot_product_flash_attention_for_cpu
    return flash(
        query,
        key,
        value,
        dropout_p,
        is_causal,
        attn_mask=None if attn_mask is None else attn_mask.detach(),
        scale=scale,
    )[0]


_OWN = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "copy_": _copy,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from,
    "_local_scalar_dense": _item,
    "resize_": _resize,
    "histc": _histc,
    "convolution_overrideable": _convolve,
    "convolution_backward_overrideable": _convolve_back,
}

# What autocast runs in lower precision (torch/amp, "CUDA Ops that can autocast to float16").
_LOWER_PRECISION = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "conv2d")


def _cast(name: str) -> Callable[..., Any]:
    operator = getattr(aten, name).default
    without = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("AutocastPrivateUse1"))

    def lowered(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(torch.get_autocast_dtype(NAME)) if floating else value

    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(without):
            return operator(*map(lowered, args))

    return kernel
