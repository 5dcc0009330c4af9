"""The numbers of a step's values, and the memory that holds them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from msgspec import Struct

from recompute_scan.fidelity.operators import OperatorKind, checksum, kind_of, row_numbers
from recompute_scan.fidelity.state import Drawn
from recompute_scan.fidelity.tensors import is_plain, plain_parts
from recompute_scan.work.ledger import Ledger, Memory, ModuleCall, Phase

# Other arguments may hold tensors, or what the program ends: no number keeps them.
_CONSTANTS = {
    *(int, float, complex, bool, str, type(None), slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
}
# Constants that do not follow from the number of rows.
_SETTINGS = {float, complex, bool, str, torch.dtype}
# An operator that reads all its arguments.
_ANY = kind_of(torch.ops.aten.cat.default)
storage_of: Any = torch.Tensor.__base__.untyped_storage  # type: ignore[union-attr]


class _End(weakref.ref[torch.UntypedStorage]):
    """A weak reference that knows what it refers to when that is gone."""

    __slots__ = ("memory",)
    memory: Memory


class Given(Struct, eq=False, gc=False):
    """The arguments of one call, taken apart.

    Attributes:
        kind: The operator.
        phase: Where the call runs.
        key: Equal for calls that compute the same; ``None`` where no number is needed.
        settings: The constants that do not follow from shapes.
        tensors: All tensors, in order.
        memories: The memory that the result depends on.
        of_tensor: The memory of each tensor, by its identity.
        written: The memory that the call writes.
        drawn: Sees whether it draws random numbers.
        begun: The moment at which it begins, on a GPU.
    """

    kind: OperatorKind
    phase: Phase
    key: list[object] | None
    settings: list[object] = []
    tensors: list[torch.Tensor] = []
    memories: list[Memory] = []
    of_tensor: dict[int, list[Memory]] = {}
    written: list[Memory] = []
    drawn: Drawn | None = None
    begun: Any = None


class Values:
    """Gives numbers to values, and notes when their memory is first seen and when it ends.

    Attributes:
        numbers: A number for each key of the step.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._memories: dict[int, Memory] = {}
        self._ended: list[_End] = []
        self.numbers: dict[object, int] = {}
        self._shapes: dict[object, int] = {}
        self._number = 0

    def end(self) -> None:
        """Nothing is looked at any more."""
        self.drain()
        for memory in self._ledger.memories:
            memory.reference = None
        self._memories.clear()
        self.numbers.clear()
        self._shapes.clear()

    # Numbers

    def fresh(self) -> int:
        """A number that no other value has."""
        self._number += 1
        return self._number

    def number_of(self, key: object) -> int:
        """The number that equal keys share."""
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = self.fresh()
        return number

    def take(self, values: Iterable[Any], given: Given) -> None:
        """Take arguments of a call apart."""
        key = given.key
        for value in values:
            kind = type(value)
            if isinstance(value, torch.Tensor):
                given.tensors.append(value)
                self._take_tensor(value, given)
            elif isinstance(value, (list, tuple, dict)):
                if key is not None:
                    key += (kind, len(value))
                self.take(value.values() if isinstance(value, dict) else value, given)
            elif key is not None and kind in _CONSTANTS:
                # 0.0 and -0.0 are equal, and what is computed from them is not. Python before 3.12
                # has no hash of slices.
                known = value if value and kind is not slice else repr(value)
                key += (kind, known)
                if kind in _SETTINGS:
                    given.settings.append(known)
            elif key is not None:
                key.append(self.fresh())

    def _take_tensor(self, value: torch.Tensor, given: Given) -> None:
        strided = is_plain(value) and value.layout is torch.strided
        parts = [value] if strided else plain_parts(value)
        key, found = given.key, []
        if parts is None:
            parts, more = [], self.fresh()
            if key is not None:
                key.append(more)
        for part in parts:
            memory = self.memory_of(part, given.phase, numbered=key is not None)
            if memory is not None:
                found.append(memory)
            if key is None:
                continue
            if given.kind.derives and (memory is not None or part.numel()):
                key.append(memory.number if memory is not None else self.fresh())
            shape = (
                *(part.shape, part.stride(), part.storage_offset(), part.dtype, part.device),
                *(part.is_conj(), part.is_neg()),
            )
            key.append(self._shapes.setdefault(shape, len(self._shapes)))
        given.of_tensor[id(value)] = found
        if given.kind.derives:
            given.memories += found

    def see_rows(
        self, call: ModuleCall, given: Sequence[Any], weights: Iterable[torch.Tensor]
    ) -> None:
        """The rows of a module's arguments, and a number for its weights and all other arguments.

        A row is one of all tensors that have as many as the first tensor of two dimensions.
        """
        strided = [is_plain(one) and one.layout is torch.strided for one in given]
        tensors = [one for one, is_strided in zip(given, strided, strict=True) if is_strided]
        # A row of one element is equal to others by chance.
        first = next((one for one in tensors if one.dim() > 1 and one[:1].numel() > 1), None)
        memory = self.memory_of(first, "forward") if first is not None else None
        if first is None or memory is None:  # a transform of functions works with it
            return
        split = [
            there and one.shape[:1] == first.shape[:1]
            for one, there in zip(given, strided, strict=True)
        ]
        rows = [row_numbers(one) for one, is_split in zip(given, split, strict=True) if is_split]
        call.sources = frozenset(memory.sources)
        call.rows = tuple(map(hash, zip(*rows, strict=True))) if all(rows) else ()
        others = Given(_ANY, "forward", [])
        whole = [one for one, is_split in zip(given, split, strict=True) if not is_split]
        self.take((split, whole, list(weights)), others)
        call.weights = hash(tuple(others.key or ()))

    # Memory

    def known(self, tensor: torch.Tensor) -> tuple[Memory | None, torch.UntypedStorage | None]:
        """The memory of a tensor, or of its first part, if it has been seen; and its storage."""
        storage = _in_memory(tensor)[1]
        memory = self._memories.get(storage._cdata) if storage is not None else None
        return (memory if memory is not None and memory.died is None else None), storage

    def memory_of(
        self, tensor: torch.Tensor, phase: Phase, *, numbered: bool = True
    ) -> Memory | None:
        """The memory of a tensor, or of its first part, that a call gets; ``None`` without memory.

        Only if ``numbered`` does the number of its value have to be right.
        """
        part, storage = _in_memory(tensor)
        if part is None:
            return None
        memory = self._memories.get(storage._cdata)
        if memory is None or memory.died is not None:
            memory = self.first_seen(storage, phase, made=False)
            memory.expected = 0 if part.is_inference() else part._version
        elif numbered or memory.unwritten:
            version = 0 if part.is_inference() else part._version
            if version > memory.expected or memory.read_from_outside:
                # Written by what no dispatch shows, or perhaps so.
                memory.number = self.fresh()
                memory.unwritten = False
                memory.expected = max(version, memory.expected)
        if numbered and memory.arriving and (bits := checksum(storage)) is not None:
            # It has no number here, and may still arrive: each read sums it up again.
            memory.number = self.number_of(("arrived", id(memory), bits))
        if numbered and memory.outside and memory.checksum is None:
            memory.checksum = checksum(storage)
        return memory

    def first_seen(self, storage: torch.UntypedStorage, phase: Phase, *, made: bool) -> Memory:
        """The entry of memory that was not seen before, made by an operator or not."""
        number, place = self.fresh(), len(self._ledger.operations)
        memory = Memory(number, storage.nbytes(), place, not made, phase, (number,))
        memory.last_read = place
        reference = _End(storage, self._ended.append)
        reference.memory = memory
        memory.reference = reference
        self._memories[storage._cdata] = memory
        self._ledger.memories.append(memory)
        return memory

    def changed_outside(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the program has written what a call gets, as through an array of NumPy."""
        changed = False
        for one in tensors:
            memory, _ = self.known(one)
            if memory is not None and memory.outside and memory.checksum is not None:
                now = checksum(storage_of((plain_parts(one) or [one])[0]))
                if now != memory.checksum:
                    memory.number, memory.checksum, changed = self.fresh(), now, True
        return changed

    def drain(self) -> None:
        """Note the ends of memory since the last operation."""
        while self._ended:
            memory = self._ended.pop().memory
            memory.died = len(self._ledger.operations)
            memory.reference = None

    def alive(self) -> list[tuple[int, Memory]]:
        """The memory that lives now, each with the identity of its storage."""
        self.drain()
        return [(key, memory) for key, memory in self._memories.items() if memory.died is None]


def _in_memory(tensor: torch.Tensor) -> tuple[torch.Tensor | None, Any]:
    """The tensor or its first part, and its storage; ``None`` twice where it has none."""
    if not is_plain(tensor):
        parts = plain_parts(tensor)
        if not parts:
            return None, None
        tensor = parts[0]
    if tensor.layout is not torch.strided:
        return None, None
    try:
        storage = storage_of(tensor)
        return (tensor, storage) if storage.data_ptr() else (None, None)
    except (RuntimeError, NotImplementedError):
        return None, None
