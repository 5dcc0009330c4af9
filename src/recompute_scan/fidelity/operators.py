"""The kinds of operators, and the tensors and numbers in a call of one."""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import MemberDescriptorType
from typing import Any, cast

import torch
from isal import isal_zlib
from msgspec import Struct
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from recompute_scan.fidelity.tensors import plain_parts

# Their results are there later, or elsewhere; results that are computed from them are compared.
COMMUNICATION = ("c10d", "_c10d_functional", "c10d_functional", "fsdp")
# Prefixes of operators with results that hold whatever the memory held.
_UNINITIALIZED = ("empty", "new_empty", "resize_", "set_", "_empty")
# Operators that write all of their first argument, whatever it held.
_OVERWRITING = ("fill_", "zero_", "copy_", "normal_", "uniform_", "bernoulli_", "exponential_")
_NUMBERS = (bool, int, float, str, torch.dtype)
# How far a value is looked into.
_DEEPEST, _MOST = 6, 4096
# Rows of more elements together are not summed up.
_MOST_ELEMENTS = 1 << 22
_MOST_ROWS = 4096
# Memory from outside is compared at a second use, up to this size.
_MOST_SUMMED = 1 << 26


class OperatorKind(Struct, frozen=True):
    """An operator, as it is known before it is called.

    Attributes:
        name: Without its overload: ``aten.addmm``.
        computes: Whether its result is new data, to be compared.
        writes: Whether it writes an argument, which is its result then.
        leaves_open: Whether its result holds what the memory held.
        overwrites: Whether it writes all of its first argument.
        may_draw: Whether it may draw random numbers.
        foreign: Whether it is not one of torch's.
        communicates: Whether it exchanges data with other processes.
        derives: Whether its result depends on the elements of its arguments.
        written: Places of the arguments that it writes.
    """

    name: str
    computes: bool
    writes: bool = False
    leaves_open: bool = False
    overwrites: bool = False
    may_draw: bool = False
    foreign: bool = False
    communicates: bool = False
    derives: bool = True
    written: tuple[int, ...] = ()

    @property
    def changes(self) -> bool:
        """Whether it may change what it gets, or a random state."""
        return self.writes or self.may_draw


@functools.lru_cache(maxsize=4096)
def kind_of(operator: Any) -> OperatorKind:
    """The kind of an operator, as ``__torch_dispatch__`` gets it."""
    schema = getattr(operator, "_schema", None)
    if schema is None or not hasattr(schema, "is_mutable"):  # a higher-order operator
        return OperatorKind(getattr(operator, "__name__", str(operator)), computes=True)
    space, _, base = schema.name.partition("::")
    name = f"{space}.{base}"
    if (
        (space in COMMUNICATION and "wait_tensor" not in base)
        or space in ("profiler", "prim")
        or base.startswith("sym_")
        or base in ("detach", "alias", "lift_fresh", "_unsafe_view")
    ):
        return OperatorKind(name, computes=False, communicates=space in COMMUNICATION)
    leaves_open = base.startswith(_UNINITIALIZED)
    writes = schema.is_mutable
    returned = [one.alias_info for one in schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in returned)
    foreign = space not in ("aten", "prims")
    tags = getattr(operator, "tags", ())
    return OperatorKind(
        name,
        computes=bool(schema.returns or writes) and not is_view and not leaves_open,
        writes=writes,
        leaves_open=leaves_open,
        overwrites=base in _OVERWRITING,
        may_draw=foreign or torch.Tag.nondeterministic_seeded in tags,
        foreign=foreign,
        communicates=space in COMMUNICATION,
        derives=not base.endswith("_like") and not base.startswith("new_"),
        written=tuple(
            place
            for place, one in enumerate(schema.arguments)
            if one.alias_info is not None and one.alias_info.is_write
        ),
    )


class SeeingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that only looks; code is compiled as without it.

    Otherwise a function that is compiled for the first time while the mode is on would stay
    uncompiled from then on.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether the compiler does not see the mode."""
        return True


def results(
    kind: OperatorKind, result: Any, args: Sequence[Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that a call has computed: those to compare, and the others.

    Of several results of torch's own operators the first is compared: the others follow from it, or
    hold padding and seeds that were never written. Of a list, all.
    """
    if isinstance(result, torch.Tensor):
        return [result], []
    if isinstance(result, (list, tuple)):
        first = result[0] if result else None
        if isinstance(first, torch.Tensor):
            computed = [one for one in result if isinstance(one, torch.Tensor)]
            both = isinstance(result, list) or kind.foreign
            return (computed, []) if both else (computed[:1], computed[1:])
        if isinstance(first, (list, tuple)):
            return [one for one in first if isinstance(one, torch.Tensor)], []
    return tensors([args[place] for place in kind.written if place < len(args)]), []


def tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """All tensors among arguments, in order."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple, dict)) and value:
            found += [one for one in _leaves(value) if isinstance(one, torch.Tensor)]
    return found


def arguments(
    args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], tuple[object, ...]]:
    """A call's tensors; and its numbers, flags and types; each in order."""
    given, numbers = [], []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            given.append(value)
        elif isinstance(value, _NUMBERS):
            numbers.append(value)
        elif isinstance(value, (list, tuple, dict)) and value:
            leaves = _leaves(value)
            given += [one for one in leaves if isinstance(one, torch.Tensor)]
            numbers += [one for one in leaves if isinstance(one, _NUMBERS)]
    return given, tuple(numbers)


def _leaves(value: Any) -> Sequence[Any]:
    """All in it; most often it is a list of sizes, which holds no others."""
    flat = isinstance(value, (list, tuple)) and not isinstance(value[0], (list, tuple, dict))
    return value if flat else tree_flatten(value)[0]


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor, or of its first part; ``None`` where it has none."""
    try:
        memory = tensor.untyped_storage()
        if memory.data_ptr():
            return memory
    except (RuntimeError, NotImplementedError):  # a sparse tensor, a subclass, one without memory
        pass
    parts = plain_parts(tensor)
    return storage_of(parts[0]) if parts and parts[0] is not tensor else None


def tensors_in(value: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a value, each with the expression that gives it.

    Looks into tuples, lists, dictionaries and the attributes of other objects, and runs nothing of
    theirs: no property, no method of a subclass.
    """
    met: set[int] = set()
    waiting = [(name, value, 0)]
    while waiting and len(met) < _MOST:
        name, value, depth = waiting.pop()
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            yield name, cast("torch.Tensor", value)
            continue
        if id(value) in met or depth >= _DEEPEST:
            continue
        met.add(id(value))
        inner = list(parts_of_value(value))
        waiting += [(f"{name}{step}", one, depth + 1) for step, one in reversed(inner)]


def parts_of_value(value: Any) -> Iterator[tuple[str, object]]:
    """The values in a container or an object, each with the step that leads to it."""
    kind = type(value)
    sequence: Any = next((one for one in (tuple, list, deque) if issubclass(kind, one)), None)
    if sequence is not None:
        names = getattr(kind, "_fields", ()) if sequence is tuple else ()
        for at, one in enumerate(sequence.__iter__(value)):
            yield (f".{names[at]}" if at < len(names) else f"[{at}]"), one
    elif issubclass(kind, dict):
        yield from ((f"[{_key(key)}]", one) for key, one in dict.items(value))
    if issubclass(kind, (type, torch.nn.Module)) or kind.__module__ in ("builtins", "types"):
        return
    held: Any = None
    with suppress(AttributeError):
        held = object.__getattribute__(value, "__dict__")
    # A transformers output keeps each of its fields as an item and as an attribute.
    if type(held) is dict and not issubclass(kind, dict):
        yield from ((f".{key}", one) for key, one in list(held.items()))
    for base in kind.__mro__:
        for key, slot in vars(base).items():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):
                    yield f".{key}", slot.__get__(value, kind)


def _key(key: object) -> str:
    return repr(key) if type(key) in (str, int, bool) else f"a {type(key).__name__}"


def checksum(storage: torch.UntypedStorage) -> int | None:
    """Of memory that other libraries can write, and that is not too large; else ``None``."""
    size = storage.nbytes()
    if storage.device.type != "cpu" or size > _MOST_SUMMED:
        return None
    return int(isal_zlib.crc32((ctypes.c_char * size).from_address(storage.data_ptr())))


def row_numbers(tensor: torch.Tensor) -> tuple[int, ...]:
    """A number for each row of a tensor, equal where all bits are; none if there are too many.

    The bits are summed up as whole numbers, with weights, so that no order of the sum matters.
    """
    rows = tensor.shape[0]
    if not 0 < rows <= _MOST_ROWS or not 0 < tensor.numel() <= _MOST_ELEMENTS:
        return ()
    flat = tensor.detach().reshape(rows, -1).contiguous()
    if flat.dtype == torch.bool:
        flat = flat.view(torch.uint8)
    elif flat.dtype.is_floating_point or flat.dtype.is_complex:
        size = min(flat.element_size(), 8)
        flat = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    places = torch.arange(flat.shape[1], device=flat.device, dtype=torch.int64)
    mixed = (places * 2654435761 + 40503) | 1
    sums = (flat.to(torch.int64) * mixed).sum(1)
    squares = (flat.to(torch.int64) * (mixed ^ (places << 17))).sum(1)
    return tuple(hash(pair) for pair in zip(sums.tolist(), squares.tolist(), strict=True))
