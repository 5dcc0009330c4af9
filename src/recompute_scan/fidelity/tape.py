"""What a region's run did, operator by operator, without the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from msgspec import Struct, field

from recompute_scan.fidelity.fingerprint import Fingerprint, fingerprint
from recompute_scan.fidelity.operators import OperatorKind, numbers, results, storage_of, tensors
from recompute_scan.fidelity.random_state import generator_of, state_of


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
        outside: What it got from outside the region.
        numbers: Its arguments that are no tensors, as text.
        drawing: Where it drew random numbers.
        differentiable: Whether an argument needs a gradient, with autograd on.
        place: Number of the call on its tape.
        sources: Numbers of the calls that made or last wrote its arguments.
    """

    kind: OperatorKind
    prints: tuple[Fingerprint | None, ...]
    outside: tuple[Outside, ...]
    numbers: tuple[str, ...]
    drawing: Drawing | None
    differentiable: bool
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


class Tape(Struct):
    """A run of a region under way, or what is left of it.

    Attributes:
        entries: Calls so far, in order.
    """

    entries: list[Entry] = field(default_factory=list)
    _maker: dict[int, int | None] = field(default_factory=dict)
    _open: set[int] = field(default_factory=set)
    _outside: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Fingerprint | None] = field(
        default_factory=dict
    )

    def look(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Outside, ...]:
        """What an operator that is about to be called gets from outside."""
        found = []
        for place, tensor in enumerate(tensors((*args, *kwargs.values()))):
            storage = storage_of(tensor)
            if storage is None or storage in self._maker:
                continue
            key = (storage, tuple(tensor.shape), tuple(tensor.stride()))
            if key not in self._outside:
                self._outside[key] = fingerprint(tensor)
            base = tensor._base if tensor._is_view() else tensor
            found.append(Outside(place, self._outside[key], tensor.requires_grad, id(base)))
        return tuple(found)

    def add(
        self,
        kind: OperatorKind,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
        outside: tuple[Outside, ...],
        drawing: Drawing | None,
        prints: Prints,
        *,
        grad_mode: bool,
    ) -> Entry | None:
        """Note a call that has returned. ``None`` of one that computes nothing to compare."""
        arguments = tensors((*args, *kwargs.values()))
        given = _storages(arguments)
        made = _storages(tensors((result,))) - given
        if kind.leaves_open or not kind.computes:
            self._maker |= dict.fromkeys(made)
            self._open = self._open | made if kind.leaves_open else self._open - made
            return None
        computed = results(kind, result, args)
        sources = {self._maker.get(one) for one in given} - {None}
        place = len(self.entries)
        written = _storages(computed) - made if kind.writes else set()
        if written - self._maker.keys():
            # A buffer or an input of the region: from here on it is what the region made of it.
            computed = []
        prints_of = tuple(self._print(kind, one, prints) for one in computed)
        self._maker |= dict.fromkeys(made | written, place)
        self._open -= made | (written if kind.overwrites else set())
        entry = Entry(
            kind,
            prints_of,
            outside,
            numbers(args, kwargs),
            drawing,
            grad_mode
            and kind.derives
            and any(one.requires_grad for one in arguments)
            and (not computed or any(map(_has_gradient, computed))),
            place,
            frozenset(one for one in sources if one is not None),
        )
        self.entries.append(entry)
        return entry

    def _print(
        self, kind: OperatorKind, result: torch.Tensor, prints: Prints
    ) -> Fingerprint | None:
        storage = storage_of(result)
        if storage in self._open and not kind.overwrites:
            return None  # part of it may be what the memory held
        return prints.of(result)


def _has_gradient(result: torch.Tensor) -> bool:
    return result.is_floating_point() or result.is_complex()


def _storages(given: Sequence[torch.Tensor]) -> set[int]:
    return {one for one in map(storage_of, given) if one is not None}


class Drawn:
    """Sees whether an operator draws random numbers: its generator's state before and after."""

    def __init__(self, kind: OperatorKind, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._before: int | None = None
        if kind.may_draw:
            first = next(iter(tensors((*args, *kwargs.values()))), None)
            device = first.device if first is not None else kwargs.get("device")
            self._generator, self._name = generator_of(kwargs, device)
            self._before = state_of(self._generator)

    def outcome(self) -> Drawing | None:
        """After the call: what was drawn, if anything."""
        if self._before is None or state_of(self._generator) == self._before:
            return None
        return Drawing(self._name, self._before)
