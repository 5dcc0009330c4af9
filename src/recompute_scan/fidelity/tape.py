"""What a region's run did, operator by operator, without the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from msgspec import Struct, field
from torch.multiprocessing.reductions import StorageWeakRef

from recompute_scan.fidelity.elements import in_one_piece, is_plain
from recompute_scan.fidelity.fingerprint import Fingerprint
from recompute_scan.fidelity.generators import RandomDraw
from recompute_scan.fidelity.operators import OperatorKind, results, storage_of, tensors
from recompute_scan.fidelity.prints import Prints


class Outside(Struct, frozen=True):
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


class TapeEntry(Struct, frozen=True):
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


class _Memory(Struct, eq=False):
    """Memory that a run has seen.

    Attributes:
        alive: Keeps its number from being given to another, and not what it holds.
        made: Whether an operator of the run has made or written it.
        maker: The call that made or last wrote it, where that is on the tape.
        open: Whether part of it may be what it held before.
        prints: Of the tensors in it, by type and place, as long as nothing is written.
    """

    alive: StorageWeakRef
    made: bool = False
    maker: int | None = None
    open: bool = False
    prints: dict[object, Fingerprint | None] = field(default_factory=dict)


class Given(Struct, frozen=True):
    """What an operator got, as one tape knows it: its tensors, their memory, and who made that."""

    tensors: Sequence[torch.Tensor]
    memories: Sequence[_Memory | None]
    outside: tuple[Outside, ...]
    sources: frozenset[int]


class OperatorCall(Struct, frozen=True):
    """One call of an operator that has returned.

    Attributes:
        kind: The operator.
        args: Its arguments by position.
        numbers: Those that are no tensors.
        result: What it returned.
        drawing: Where it drew random numbers.
        grad_mode: Whether autograd is on.
        node: Number of the autograd node that was made last before it ran.
    """

    kind: OperatorKind
    args: Sequence[Any]
    numbers: tuple[object, ...]
    result: Any
    drawing: RandomDraw | None
    grad_mode: bool
    node: int


class Tape(Struct):
    """A run of a region under way, or what is left of it.

    Attributes:
        entries: Calls so far, in order.
    """

    entries: list[TapeEntry] = field(default_factory=list)
    _memory: dict[int, _Memory] = field(default_factory=dict)

    def look(self, arguments: Sequence[torch.Tensor], prints: Prints | None) -> Given:
        """What an operator that is about to be called gets.

        Args:
            arguments: Its tensors.
            prints: ``None`` for one that computes nothing.
        """
        memories, outside, sources = [], [], set()
        for place, tensor in enumerate(arguments):
            memory = self._memory_of(tensor)
            memories.append(memory)
            if memory is None:
                continue
            if memory.maker is not None:
                sources.add(memory.maker)
            if prints is not None and not memory.made:
                base = tensor._base if tensor._is_view() else tensor
                print_ = _print_in(memory, tensor, prints)
                outside.append(Outside(place, print_, tensor.requires_grad, id(base)))
        return Given(arguments, memories, tuple(outside), frozenset(sources))

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
        known = memory.prints.get(_within(tensor))
        return known.in_shape(tensor.shape) if known is not None else None

    def is_outside(self, tensor: torch.Tensor) -> bool:
        """Whether no operator of the run has made or written it."""
        memory = self._memory_of(tensor)
        return memory is not None and not memory.made

    def add(self, call: OperatorCall, given: Given, prints: Prints) -> TapeEntry | None:
        """Note a call that has returned. ``None`` of one that computes nothing to compare."""
        kind = call.kind
        came = tensors((call.result,))
        memories = {id(one): self._memory_of(one) for one in came}
        # Memory of the results that is none of the arguments'.
        made = [one for one in memories.values() if one is not None and one not in given.memories]
        if kind.leaves_open or not kind.computes:
            for one in made:
                one.made, one.maker, one.open = True, None, kind.leaves_open
                one.prints.clear()
            return None
        computed, others = results(kind, call.result, call.args)
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
            if memory is not None and memory.open:
                others.append(result)
                prints_of.append(None)
                continue
            print_ = prints.of(result)
            prints_of.append(print_)
            if memory is not None and (within := _within(result)) is not None:
                memory.prints[within] = print_
        entry = TapeEntry(
            kind,
            tuple(prints_of),
            tuple([prints.of(one) for one in others]),
            given.outside,
            call.numbers,
            call.drawing,
            call.grad_mode
            and kind.derives
            and True in [one.requires_grad for one in given.tensors]
            and (not computed or True in [_has_gradient(one) for one in computed]),
            call.node,
            place,
            given.sources,
        )
        self.entries.append(entry)
        return entry

    def _memory_of(self, tensor: torch.Tensor) -> _Memory | None:
        storage = storage_of(tensor)
        if storage is None:
            return None
        known = self._memory.get(storage._cdata)
        if known is None:
            known = self._memory[storage._cdata] = _Memory(
                StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            )
        return known


def _within(tensor: torch.Tensor) -> object:
    """Which part of its memory a tensor is, and as what; ``None`` where that cannot be said.

    Another shape of the same elements in the same order is the same part.
    """
    if in_one_piece(tensor):
        return tensor.dtype, tensor.storage_offset(), tensor.numel()
    if not is_plain(tensor) or tensor.layout != torch.strided:
        return None
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride(), bits


def _print_in(memory: _Memory, tensor: torch.Tensor, prints: Prints) -> Fingerprint | None:
    key = _within(tensor)
    if key is None:
        return prints.of(tensor)
    print_ = memory.prints[key] = prints.of(tensor, memory.prints.get(key))
    return print_


def _has_gradient(result: torch.Tensor) -> bool:
    return result.is_floating_point() or result.is_complex()
