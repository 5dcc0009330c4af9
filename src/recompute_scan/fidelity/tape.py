"""What a region's run did, operator by operator, without the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from msgspec import Struct, field
from torch.multiprocessing.reductions import StorageWeakRef

from recompute_scan.fidelity.fingerprint import Fingerprint, fingerprint, is_plain
from recompute_scan.fidelity.generators import generator_of, state_of
from recompute_scan.fidelity.operators import OperatorKind, numbers, results, storage_of, tensors


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


class Drawing(Struct, frozen=True):
    """An operator that drew random numbers: whose state, and what it was before."""

    generator: str
    before: int


class Entry(Struct, frozen=True):
    """One call of an operator that computes something.

    Attributes:
        kind: The operator.
        prints: Fingerprints of its results; ``None`` where they cannot be had.
        others: Fingerprints of what else it has written, part of which may be what the memory held.
        outside: What it got from outside the region.
        numbers: Its arguments that are no tensors, as text.
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
    numbers: tuple[str, ...]
    drawing: Drawing | None
    differentiable: bool
    node: int
    place: int
    sources: frozenset[int]


class Prints:
    """Fingerprints of the results of one call, each made once for all tapes."""

    def __init__(self) -> None:
        self._made: dict[int, Fingerprint | None] = {}

    def of(self, result: torch.Tensor) -> Fingerprint | None:
        """The fingerprint of a result, which is alive while this is."""
        if id(result) not in self._made:
            self._made[id(result)] = fingerprint(result)
        return self._made[id(result)]


class _Memory(Struct):
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


class Tape(Struct):
    """A run of a region under way, or what is left of it.

    Attributes:
        entries: Calls so far, in order.
    """

    entries: list[Entry] = field(default_factory=list)
    _memory: dict[int, _Memory] = field(default_factory=dict)

    def look(self, arguments: Sequence[torch.Tensor]) -> tuple[Outside, ...]:
        """What an operator that is about to be called gets from outside."""
        found = []
        for place, tensor in enumerate(arguments):
            memory = self._memory_of(tensor)
            if memory is None or memory.made:
                continue
            base = tensor._base if tensor._is_view() else tensor
            print_ = _print_in(memory, tensor)
            found.append(Outside(place, print_, tensor.requires_grad, id(base)))
        return tuple(found)

    def maker_of(self, tensor: torch.Tensor) -> int | None:
        """Number of the call that made a tensor or wrote it last."""
        memory = self._memory_of(tensor)
        return memory.maker if memory is not None else None

    def print_of(self, tensor: torch.Tensor) -> Fingerprint | None:
        """The fingerprint of a tensor as it is now; ``None`` where part of it may be anything."""
        memory = self._memory_of(tensor)
        return None if memory is None or memory.open else _print_in(memory, tensor)

    def is_outside(self, tensor: torch.Tensor) -> bool:
        """Whether no operator of the run has made or written it."""
        memory = self._memory_of(tensor)
        return memory is not None and not memory.made

    def add(
        self,
        kind: OperatorKind,
        arguments: Sequence[torch.Tensor],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
        outside: tuple[Outside, ...],
        drawing: Drawing | None,
        prints: Prints,
        *,
        grad_mode: bool,
        node: int,
    ) -> Entry | None:
        """Note a call that has returned. ``None`` of one that computes nothing to compare."""
        given = self._memories(arguments)
        made = [one for one in self._memories(tensors((result,))) if not _among(one, given)]
        if kind.leaves_open or not kind.computes:
            for one in made:
                one.made, one.maker, one.open = True, None, kind.leaves_open
                one.prints.clear()
            return None
        computed, others = results(kind, result, args)
        sources = frozenset(one.maker for one in given if one.maker is not None)
        place = len(self.entries)
        written = []
        if kind.writes:
            written = [one for one in self._memories(computed) if not _among(one, made)]
        if any(not one.made for one in written):
            # A buffer or an input of the region: from here on it is what the region made of it.
            computed = []
        for one in (*made, *written):
            one.made, one.maker = True, place
            one.prints.clear()
            if kind.overwrites or _among(one, made):
                one.open = False
        sure = [(one, self._memory_of(one)) for one in computed]
        prints_of = tuple(
            None if memory is not None and memory.open else prints.of(one) for one, memory in sure
        )
        for (result_, memory), print_ in zip(sure, prints_of, strict=True):
            if memory is not None and memory.open:
                others.append(result_)
            elif memory is not None and (within := _within(result_)) is not None:
                memory.prints[within] = print_
        entry = Entry(
            kind,
            prints_of,
            tuple(prints.of(one) for one in others),
            outside,
            numbers(args, kwargs),
            drawing,
            grad_mode
            and kind.derives
            and any(one.requires_grad for one in arguments)
            and (not computed or any(map(_has_gradient, computed))),
            node,
            place,
            sources,
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

    def _memories(self, given: Sequence[torch.Tensor]) -> list[_Memory]:
        return [one for one in map(self._memory_of, given) if one is not None]


def _among(memory: _Memory, others: Sequence[_Memory]) -> bool:
    return any(memory is one for one in others)


def _within(tensor: torch.Tensor) -> object:
    """Which part of its memory a tensor is, and as what; ``None`` where that cannot be said."""
    if not is_plain(tensor) or tensor.layout != torch.strided:
        return None
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.is_conj()


def _print_in(memory: _Memory, tensor: torch.Tensor) -> Fingerprint | None:
    key = _within(tensor)
    if key is None:
        return fingerprint(tensor)
    if key not in memory.prints:
        memory.prints[key] = fingerprint(tensor)
    return memory.prints[key]


def _has_gradient(result: torch.Tensor) -> bool:
    return result.is_floating_point() or result.is_complex()


class Drawn:
    """Sees whether an operator draws random numbers: its generator's state before and after."""

    def __init__(
        self, kind: OperatorKind, arguments: Sequence[torch.Tensor], kwargs: dict[str, Any]
    ) -> None:
        self._before: int | None = None
        if kind.may_draw:
            device = arguments[0].device if arguments else kwargs.get("device")
            self._generator, self._name = generator_of(kwargs, device)
            self._before = state_of(self._generator)

    def outcome(self) -> Drawing | None:
        """After the call: what was drawn, if anything."""
        if self._before is None or state_of(self._generator) == self._before:
            return None
        return Drawing(self._name, self._before)
