"""What a region's run did, operator by operator, without the tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from msgspec import Struct, field

from recompute_scan.fidelity.elements import part_of_memory
from recompute_scan.fidelity.fingerprint import Fingerprint, Prints
from recompute_scan.fidelity.kept_between import RandomDraw
from recompute_scan.fidelity.operators import OperatorKind, storage_of


class Outside(Struct, frozen=True, gc=False):
    """A tensor that an operator got and that no operator of the run has made.

    Attributes:
        place: Which of the operator's tensors it is.
        print: Its fingerprint, when the run first used it.
        needs_gradient: Whether autograd would give it a gradient.
        tensor_id: Of the tensor, or of what it is a view of: to recognise a parameter by.
    """

    place: int
    print: Fingerprint | None
    needs_gradient: bool
    tensor_id: int


class TapeEntry(Struct, frozen=True, gc=False):
    """One call of an operator that computes something.

    Attributes:
        kind: The operator.
        prints: Fingerprints of its results; ``None`` where they cannot be had.
        others: Fingerprints of what else it has written, part of which may be what the memory held.
        outside: What it got from outside the region.
        numbers: Its arguments that are no tensors.
        drawing: Where it drew random numbers.
        differentiable: Whether an argument needs a gradient, with autograd on.
        node: Number of the autograd node that was made last before it ran: its own, if it has one.
        place: Number of the call on its tape.
        sources: Numbers of the calls that made or last wrote its arguments.
    """

    kind: OperatorKind
    prints: tuple[Fingerprint | None, ...]
    others: tuple[Fingerprint | None, ...]
    outside: tuple[Outside, ...]
    numbers: tuple[object, ...]
    drawing: RandomDraw | None
    differentiable: bool
    node: int
    place: int
    sources: frozenset[int]


class _Memory(Struct, eq=False, gc=False):
    """Memory that a run has seen.

    Attributes:
        made: Whether an operator of the run has made or written it.
        maker: The call that made or last wrote it, where that is on the tape.
        open: Whether part of it may be what it held before.
        prints: Of the tensors in it, by type and place, as long as nothing is written.
    """

    made: bool = False
    maker: int | None = None
    open: bool = False
    prints: dict[object, Fingerprint | None] = field(default_factory=dict)


# A tensor, and where it lies; ``None`` of one without memory.
InMemory = tuple[torch.Tensor, torch.UntypedStorage | None]


class Given(Struct, frozen=True, gc=False):
    """What an operator got, as one tape knows it: memory, what is from outside, and who made it."""

    memories: Sequence[_Memory | None]
    outside: tuple[Outside, ...]
    sources: frozenset[int]


class OperatorCall(Struct, frozen=True, gc=False):
    """One call of an operator that has returned.

    Attributes:
        kind: The operator.
        numbers: Its arguments that are no tensors.
        returned: The tensors that it returned.
        computed: Those that it has computed, to be compared.
        others: What else it has computed.
        drawing: Where it drew random numbers.
        differentiable: Whether an argument needs a gradient, with autograd on.
        node: Number of the autograd node that was made last before it ran.
    """

    kind: OperatorKind
    numbers: tuple[object, ...]
    returned: Sequence[InMemory]
    computed: Sequence[torch.Tensor]
    others: Sequence[torch.Tensor]
    drawing: RandomDraw | None
    differentiable: bool
    node: int


class StorageNumbers:
    """Keeps the numbers of storages from being given to others, and not what they hold.

    As ``torch.multiprocessing.reductions.StorageWeakRef`` does, of many at once.
    """

    def __init__(self) -> None:
        self._kept: list[Any] = []
        # The class may be gone before this is, when the interpreter ends.
        self._free: Callable[[Any], object] = torch.UntypedStorage._free_weak_ref

    def keep(self, storage: torch.UntypedStorage) -> None:
        """Keep this one's too."""
        self._kept.append(storage._weak_ref())

    def __del__(self) -> None:
        for one in self._kept:
            self._free(one)


class Tape(Struct):
    """A run of a region under way, or what is left of it.

    Attributes:
        entries: Calls so far, in order.
    """

    entries: list[TapeEntry] = field(default_factory=list)
    _memory: dict[int, _Memory] = field(default_factory=dict)
    _numbers: StorageNumbers = field(default_factory=StorageNumbers)

    def look(self, arguments: Sequence[InMemory], prints: Prints | None) -> Given:
        """What an operator that is about to be called gets.

        Args:
            arguments: Its tensors.
            prints: ``None`` for one that computes nothing.
        """
        memories, outside, sources = [], [], set()
        for place, (tensor, storage) in enumerate(arguments):
            memory = self._memory_in(storage)
            memories.append(memory)
            if memory is None:
                continue
            if memory.maker is not None:
                sources.add(memory.maker)
            if prints is not None and not memory.made:
                base = tensor._base if tensor._is_view() else tensor
                print_ = _print_in(memory, tensor, prints)
                outside.append(Outside(place, print_, tensor.requires_grad, id(base)))
        return Given(memories, tuple(outside), frozenset(sources))

    def maker_of(self, tensor: torch.Tensor) -> int | None:
        """Number of the call that made a tensor or wrote it last."""
        memory = self._memory_of(tensor)
        return memory.maker if memory is not None else None

    def print_of(self, tensor: torch.Tensor, prints: Prints) -> Fingerprint | None:
        """The fingerprint of a tensor as it is now; ``None`` where part of it may be anything."""
        memory = self._memory_of(tensor)
        return None if memory is None or memory.open else _print_in(memory, tensor, prints)

    def at_hand(self, tensor: torch.Tensor) -> Fingerprint | None:
        """The same, without a look at its elements; ``None`` where it takes one.

        Nobody sees this if the tensor is dense and no subclass, and no function mode is on.
        """
        memory = self._memory_of(tensor)
        if memory is None or memory.open:
            return None
        known = memory.prints.get(part_of_memory(tensor).key)
        return known.in_shape(tensor.shape) if known is not None else None

    def is_outside(self, tensor: torch.Tensor) -> bool:
        """Whether no operator of the run has made or written it."""
        memory = self._memory_of(tensor)
        return memory is not None and not memory.made

    def add(self, call: OperatorCall, given: Given, prints: Prints) -> TapeEntry | None:
        """Note a call that has returned. ``None`` of one that computes nothing to compare."""
        kind = call.kind
        memories = {id(one): self._memory_in(storage) for one, storage in call.returned}
        # Memory of the results that is none of the arguments'.
        made = [one for one in memories.values() if one is not None and one not in given.memories]
        if kind.leaves_open or not kind.computes:
            for one in made:
                one.made, one.maker, one.open = True, None, kind.leaves_open
                one.prints.clear()
            return None
        computed, others = call.computed, [*call.others]
        place = len(self.entries)
        written = []
        if kind.writes:
            all_written = [self._memory_of(one) for one in computed]
            written = [one for one in all_written if one is not None and one not in made]
            if False in [one.made for one in written]:
                # A buffer or an input of the region: from here on it is what the region made of it.
                computed = []
        for one in (*made, *written):
            one.made, one.maker = True, place
            one.prints.clear()
        for one in (*made, *written) if kind.overwrites else made:
            one.open = False
        prints_of: list[Fingerprint | None] = []
        for result in computed:
            memory = memories[id(result)] if id(result) in memories else self._memory_of(result)
            if memory is None and result.numel():  # no memory that could be looked at
                prints_of.append(None)
                continue
            if memory is not None and memory.open:
                others.append(result)
                prints_of.append(None)
                continue
            print_ = prints.of(result)
            prints_of.append(print_)
            if memory is not None and (key := prints.part(result).key) is not None:
                memory.prints[key] = print_
        entry = TapeEntry(
            kind,
            tuple(prints_of),
            tuple([prints.of(one) for one in others if memories.get(id(one), one) is not None]),
            given.outside,
            call.numbers,
            call.drawing,
            call.differentiable
            and (not computed or True in [_has_gradient(one) for one in computed]),
            call.node,
            place,
            given.sources,
        )
        self.entries.append(entry)
        return entry

    def _memory_of(self, tensor: torch.Tensor) -> _Memory | None:
        return self._memory_in(storage_of(tensor))

    def _memory_in(self, storage: torch.UntypedStorage | None) -> _Memory | None:
        if storage is None:
            return None
        number = storage._cdata
        known = self._memory.get(number)
        if known is None:
            known = self._memory[number] = _Memory()
            self._numbers.keep(storage)
        return known


def _print_in(memory: _Memory, tensor: torch.Tensor, prints: Prints) -> Fingerprint | None:
    key = prints.part(tensor).key
    if key is None:
        return prints.of(tensor)
    print_ = memory.prints[key] = prints.of(tensor, memory.prints.get(key))
    return print_


def _has_gradient(result: torch.Tensor) -> bool:
    return result.is_floating_point() or result.is_complex()
