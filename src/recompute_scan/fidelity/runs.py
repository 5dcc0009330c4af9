"""The runs of a region that are compared: a forward, and each recompute along it.

A checker goes along the forward's calls while the recompute makes its calls. It finds the results
that differ, and why the first one does, as far as the arguments of both calls show that.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, TypeVar

import torch
from msgspec import Struct, field
from msgspec.structs import replace
from torch.utils._python_dispatch import _disable_current_modes

from recompute_scan.fidelity.lost_gradients import (
    HandedTensors,
    SavedGraph,
    arrives,
    graphs_below,
)
from recompute_scan.fidelity.operators import tensors
from recompute_scan.fidelity.state import State
from recompute_scan.fidelity.tape import Around, Prints, RegionRun, TapeEntry, nodes_so_far
from recompute_scan.fidelity.tensors import Fingerprint, unseen
from recompute_scan.result.fidelity import Difference, DifferenceKind, LostGradient, Operation

_Prints = tuple[Fingerprint | None, ...]
_T = TypeVar("_T")
_Where = Callable[[], Operation]
# Makes a call once more: the fingerprint of its first result, where that changes nothing.
_Repeat = Callable[[], Fingerprint | None]


def cause_between(twin: TapeEntry, entry: TapeEntry) -> tuple[DifferenceKind, dict[str, Any]]:
    """Why two calls of one operator have different results, as far as their arguments show."""
    types = other_in(twin, entry, "dtype")
    if types is not None:
        return "type", types
    if twin.drawing and entry.drawing and twin.drawing.before != entry.drawing.before:
        return "random", {"generator": entry.drawing.generator}
    if changed_inputs(twin, entry):
        return "input", {}
    before, after = ([str(one) for one in call.numbers] for call in (twin, entry))
    if before != after:
        changed = (pair for pair in zip(before, after, strict=False) if pair[0] != pair[1])
        one, other = next(changed, (None, None))
        return "argument", {"forward": one, "recompute": other} if one is not None else {}
    shapes = other_in(twin, entry, "shape")
    if shapes is not None:
        return "shape", shapes
    return "value", {}


def changed_inputs(twin: TapeEntry, entry: TapeEntry) -> list[Fingerprint]:
    """The tensors from outside the region that differ from the forward call's."""
    after = {one.place: one for one in entry.outside}
    pairs = ((before, after.get(before.place)) for before in twin.outside)
    return [
        now.print
        for before, now in pairs
        if now is not None and now.print is not None and differ(before.print, now.print)
    ]


def other_in(twin: TapeEntry, entry: TapeEntry, what: str) -> dict[str, Any] | None:
    """The first ``dtype`` or ``shape`` of a result that differs, on both sides."""
    for one, other in zip(twin.prints, entry.prints, strict=False):
        if one is None or other is None:
            continue
        before, after = getattr(one, what), getattr(other, what)
        if before != after:
            names = [str(value).removeprefix("torch.") for value in (before, after)]
            return {"forward": names[0], "recompute": names[1]}
    return None


def differ(one: Fingerprint | None, other: Fingerprint | None) -> bool:
    """Are both known, and further apart than rounding explains?"""
    if one is None or other is None or one.same_bits(other):
        return False
    if one.dtype != other.dtype or not (one.dtype.is_floating_point or one.dtype.is_complex):
        return True
    distance = one.distance(other)
    return distance is None or distance > one.rounding()


def apart_by(before: _Prints, now: _Prints) -> str | None:
    """``None`` for the same bits, ``rounding``, or ``altogether``."""
    if len(before) != len(now):
        return "altogether"
    apart: str | None = None
    for one, other in zip(before, now, strict=True):
        if one is not None and other is not None and not one.same_bits(other):
            if differ(one, other):
                return "altogether"
            apart = "rounding"
    return apart


# How many operators of the forward may be missing from a recompute before it goes on alike.
_LOOKAHEAD = 64
Why = Literal["grad-mode-off", "detached"]
_NUMBERS = itertools.count(1)


class _Suspect(Struct, frozen=True):
    """A call with a result that differs.

    Attributes:
        twin: Place of the forward's call.
        cause: Why: a difference of this call, or of an argument.
        own: Whether the difference is its own.
    """

    twin: int
    cause: Difference
    own: bool
    entry: TapeEntry


class Checker(Struct, eq=False):
    """Goes along the forward's calls while the recompute makes its own.

    :mod:`recompute_scan.fidelity.lost_gradients` sees which tensors the backward pass uses, and so
    which differences change a gradient. Where it cannot see that, a difference counts if autograd
    runs through the call, or through a later call that differs because of it.

    Attributes:
        compared: Results that were compared.
        random: Of these, drawn ones.
        rounding: Largest distance of one that differs by rounding only.
    """

    _forward: list[TapeEntry]
    _parameters: Callable[[], dict[int, str]]
    _grad_mode: bool
    _next: int = 0
    _unmatched: Difference | None = None
    _strays: dict[int, _Suspect] = field(default_factory=dict)
    _changed: dict[object, Difference] = field(default_factory=dict)
    _found: Difference | None = None
    _suspected: dict[int, _Suspect] = field(default_factory=dict)
    _aside: dict[int, Difference] = field(default_factory=dict)
    _faint: dict[int, Difference] = field(default_factory=dict)
    _written: Difference | None = None
    _lost: dict[str, LostGradient] = field(default_factory=dict)
    compared: int = 0
    random: int = 0
    rounding: float | None = None

    def meet(self, entry: TapeEntry, where: _Where, repeat: _Repeat) -> None:
        """The recompute has made a call, as :meth:`RegionRun.made` gets it."""
        place = self._place_of(entry)
        if (place is None or place > self._next) and self._unmatched is None:
            self._unmatched = self._cause_of(entry) or self._other_operator(entry, where)
        if place is None:
            if self._unmatched is not None:
                self._strays[entry.place] = _Suspect(-1, self._unmatched, True, entry)
            return
        twin = self._forward[place]
        self._next = place + 1
        self.compared += 1
        self.random += entry.drawing is not None
        self._see_gradients(twin, entry, where)
        changed = changed_inputs(twin, entry)
        if not entry.prints:
            if self._written is None and changed:
                self._written = Difference("input", where())
            return
        apart = apart_by(twin.prints, entry.prints)
        if apart == "altogether":
            inherited = self._unmatched or self._cause_of(entry)
            cause = inherited or self._difference(twin, entry, where, repeat)
            for tensor in changed:
                self._changed.setdefault((tensor.bits, tensor.shape), cause)
            self._suspected[entry.place] = _Suspect(place, cause, inherited is None, entry)
            if entry.differentiable and self._found is None:
                self._found = cause
            return
        self._unmatched = None  # what lay between changed nothing
        self._strays.clear()
        if (twin.others or entry.others) and apart_by(twin.others, entry.others) == "altogether":
            kind, facts = cause_between(twin, entry)
            self._aside[entry.place] = Difference(kind, where(), **facts)
        if apart == "rounding":
            for one, other in zip(twin.prints, entry.prints, strict=False):
                if one is not None and other is not None and not one.same_bits(other):
                    self.rounding = max(self.rounding or 0.0, one.distance(other) or 0.0)
            source = self._cause_of(entry)
            if source is not None:
                self._faint[entry.place] = source  # a finer type shows it again
        if entry.differentiable and self._found is None:
            self._found = self._cause_in(entry.sources)

    def _cause_of(self, entry: TapeEntry) -> Difference | None:
        """The difference in the arguments of a call that differs, if any."""
        others = self._aside | self._faint
        found = (others[one] for one in sorted(entry.sources) if one in others)
        return self._cause_in(entry.sources) or next(found, None)

    def _cause_in(self, places: Collection[int]) -> Difference | None:
        first = min((one for one in places if one in self._suspected), default=None)
        return self._suspected[first].cause if first is not None else None

    @property
    def differing(self) -> int:
        """How many results differ, by more than rounding."""
        return len(self._suspected)

    def cause_of_saved(self, maker: int | None, print_: Fingerprint) -> Difference | None:
        """Why a tensor differs that the call ``maker`` made, or a view of it; ``None`` where
        unknown.

        Asked when the recompute has ended; a tensor from outside has no maker.
        """
        if maker is None:
            return self._changed.get((print_.bits, print_.shape))
        cause = self._cause_in((maker,))
        aside = self._aside.get(maker)
        if cause is None and aside is not None:
            # A further result may be padding, unless it was drawn.
            return aside if aside.kind == "random" else None
        if cause is None and maker in self._strays:
            cause = self._strays[maker].cause
        views = (one.cause for one in self._suspected.values() if maker in one.entry.sources)
        return cause or next(views, None)

    def cause_in_graph(
        self, makers: Collection[int], outside: Collection[Fingerprint], nodes: Collection[int]
    ) -> Difference | None:
        """The first difference in a recomputed graph: by the calls that made the tensors that its
        nodes have saved, the saved tensors from outside the region, and the nodes' numbers.
        """
        for place, suspect in sorted((self._suspected | self._strays).items()):
            entry = suspect.entry
            called = suspect.own and suspect.cause.kind != "input" and entry.differentiable
            if place in makers or (called and (entry.kind.writes or entry.node in nodes)):
                return suspect.cause
        changed = (self._changed.get((one.bits, one.shape)) for one in outside)
        return next(filter(None, changed), None)

    @property
    def difference(self) -> Difference | None:
        """The first result that matters and differs from the forward's, once the run has ended.

        A recompute may stop where the backward pass has its tensors, before the forward's last
        calls: the forward shows which arguments these would have had.
        """
        if self._found is not None or self._unmatched is not None:
            return self._found or self._unmatched
        suspected = {one.twin: one.cause for one in self._suspected.values()}
        for later in self._forward[self._next :]:
            for one in sorted(later.sources):
                if one in suspected:
                    if later.differentiable:
                        return suspected[one]
                    suspected[later.place] = suspected[one]
        return None

    def _place_of(self, entry: TapeEntry) -> int | None:
        forward = self._forward
        if self._next < len(forward) and forward[self._next].kind is entry.kind:
            return self._next
        for place in range(self._next + 1, min(len(forward), self._next + 1 + _LOOKAHEAD)):
            twin = forward[place]
            if twin.kind is entry.kind and apart_by(twin.prints, entry.prints) != "altogether":
                return place
        return None

    def _other_operator(self, entry: TapeEntry, where: _Where) -> Difference:
        forward = self._forward
        for twin in forward[self._next : self._next + _LOOKAHEAD]:
            types = other_in(twin, entry, "dtype") if twin.kind is entry.kind else None
            if types is not None and other_in(twin, entry, "shape") is None:
                return Difference("type", where(), **types)
        expected = forward[self._next].kind.name if self._next < len(forward) else None
        return Difference("operators", where(), instead_of=expected)

    def _see_gradients(self, twin: TapeEntry, entry: TapeEntry, where: _Where) -> None:
        after = {one.place: one for one in entry.outside}
        for before in twin.outside:
            now = after.get(before.place)
            if not before.needs_gradient or now is None or before.print is None:
                continue
            if self._grad_mode and (now.needs_gradient or differ(before.print, now.print)):
                continue
            name, operation = self._parameters().get(before.tensor_id, ""), where()
            why: Why = "detached" if self._grad_mode else "grad-mode-off"
            self._lost.setdefault(name or operation.site, LostGradient(name, operation, why))

    @property
    def lost(self) -> tuple[LostGradient, ...]:
        """Tensors that need a gradient in the forward, and get none through the recompute."""
        return tuple(self._lost.values())

    def _difference(
        self, twin: TapeEntry, entry: TapeEntry, where: _Where, repeat: _Repeat
    ) -> Difference:
        kind, facts = cause_between(twin, entry)
        if kind == "value" and self._written is not None:
            return self._written
        if kind == "value":
            again = repeat()
            mine = entry.prints[0] if entry.prints else None
            varies = again is not None and mine is not None and not again.same_bits(mine)
            if varies or self.rounding:
                kind = "atomics"
        one, other = next(
            (pair for pair in zip(twin.prints, entry.prints, strict=False) if differ(*pair)),
            (None, None),
        )
        distance = one.distance(other) if one is not None and other is not None else None
        return Difference(kind, where(), distance=distance, **facts)


class Shown(Struct, frozen=True):
    """The outcome of one recompute, without tensors and fingerprints.

    Attributes:
        forward: Number of the forward's run; 0 where it repeats several in part.
        grad_mode: Whether autograd was on.
        operators: Results compared.
        random: Of these, drawn ones.
        differing: Of these, those that differ by more than rounding.
        rounding: Largest distance of one that differs by rounding only.
        lost: Gradients that are lost, unless another recompute of the forward has them.
        possible: Differences in order, each with a function that returns whether the backward pass
            has used the tensor; it may not have done so yet.
    """

    forward: int
    grad_mode: bool
    operators: int
    random: int
    differing: int
    rounding: float | None
    lost: tuple[LostGradient, ...]
    possible: tuple[tuple[Callable[[], bool], Difference], ...]

    @property
    def difference(self) -> Difference | None:
        """The first difference that changes a gradient; known after the backward pass."""
        return next((difference for used, difference in self.possible if used()), None)


class ForwardRun(RegionRun):
    """The first run of a region, with which a recompute is compared."""

    keeps = True

    def __init__(
        self,
        untold: Callable[[str], None],
        handed: HandedTensors | None,
        before: State,
        random_before: dict[str, int],
    ) -> None:
        super().__init__(untold)
        self.number = next(_NUMBERS)
        self.handed = handed
        if handed is not None:
            handed.run = self
        self.before = before
        self.after = before
        self._random_before = random_before
        self.drew: dict[str, int] = {}
        self.prints: list[Fingerprint | None] = []
        self.results: _Prints = ()

    def returned(self, result: Any) -> None:
        """The forward returns: its recompute has to come to the same."""
        try:
            unseen(self._see_results, tensors((result,)), Prints((self,)))
        except Exception as error:
            self.failed(error)

    def _see_results(self, results: list[torch.Tensor], prints: Prints) -> None:
        self.results = tuple(self.tape.print_of(one, prints) for one in results)
        prints.let_go()

    def _see_saved(self, tensor: torch.Tensor, place: int, prints: Prints) -> None:
        self.prints.append(self.tape.print_of(tensor, prints))

    def end(self, after: State, random_after: dict[str, int]) -> None:
        """The forward has ended; only what another run may need is kept."""
        self.after = after
        if self.handed is not None:
            self.handed.run = None
        self.drew = {
            name: state
            for name, state in self._random_before.items()
            if random_after.get(name) != state
        }


class PartRun(RegionRun):
    """A recompute on other parts than the forward's runs: only where it draws can be compared."""

    def __init__(self, untold: Callable[[str], None], forwards: Iterable[ForwardRun]) -> None:
        super().__init__(untold)
        entries = (entry for one in forwards for entry in one.tape.entries)
        self._drawn = {entry.drawing.before for entry in entries if entry.drawing}
        self._found: Difference | None = None

    def made(self, entry: TapeEntry, where: _Where, repeat: _Repeat) -> None:
        """Note the first call that draws from a state from which no call of the forward drew."""
        drawing = entry.drawing
        if self._found is None and drawing is not None and drawing.before not in self._drawn:
            self._found = Difference("random", where(), generator=drawing.generator)

    def shown(self) -> Shown | None:
        """The outcome, if there is one."""
        if self._found is None:
            return None
        return Shown(0, True, 0, 1, 1, None, (), ((_always, self._found),))


class RecomputeRun(RegionRun):
    """A recompute, followed along the forward as it goes."""

    def __init__(
        self,
        untold: Callable[[str], None],
        handed: HandedTensors | None,
        forward: ForwardRun,
        parameters: Callable[[], dict[int, str]],
        around: Around,
        drawn_from: dict[str, int],
    ) -> None:
        super().__init__(untold)
        self.handed = handed
        self._around = around
        self._forward = forward
        self._checker = Checker(forward.tape.entries, parameters, self.grad_mode)
        self._drawn_from = drawn_from
        self._first_node = nodes_so_far()
        self._differing: list[tuple[int, int | None, Fingerprint]] = []
        self._possible: list[tuple[Callable[[], bool], Difference]] | None = None
        if handed is not None and forward.handed is not None:
            handed.run, self._possible = self, []

    def made(self, entry: TapeEntry, where: _Where, repeat: _Repeat) -> None:
        """Compare it with the forward's."""
        self._checker.meet(entry, where, repeat)

    def _see_saved(self, tensor: torch.Tensor, place: int, prints: Prints) -> None:
        known = self._forward.prints
        now = self.tape.print_of(tensor, prints)
        if place < len(known) and now is not None and differ(known[place], now):
            self._differing.append((place, self.tape.maker_of(tensor), now))

    def returned(self, result: Any) -> None:
        """The recompute returns, and the backward pass will run through its own nodes."""
        try:
            outputs = [one for one in tensors((result,)) if one.grad_fn is not None]
            # A subclass has to see its tensors pass, or it would be lost from the graph.
            with torch.no_grad(), _disable_current_modes():
                graphs = graphs_below(outputs, self._first_node)
            unseen(self._see_graphs, outputs, graphs, tensors((result,)))
        except Exception as error:
            self.failed(error)

    def _comes_to_the_same(self, results: list[torch.Tensor]) -> bool:
        """Whether all results are the forward's, but for rounding."""
        before, prints = self._forward.results, Prints((self,))
        now = tuple(self.tape.print_of(one, prints) for one in results)
        known = bool(now) and None not in (*before, *now)
        same = known and apart_by(before, now) != "altogether"
        prints.let_go()
        return same

    def _see_graphs(
        self, outputs: list[torch.Tensor], graphs: list[SavedGraph], results: list[torch.Tensor]
    ) -> None:
        self._possible = []
        for output, graph in zip(outputs, graphs, strict=True):
            makers = _known(map(self.tape.maker_of, graph.saved))
            prints = Prints((self,))
            outside = _known(
                self.tape.print_of(one, prints) for one in graph.saved if self.tape.is_outside(one)
            )
            prints.let_go()
            cause = self._checker.cause_in_graph(makers, outside, graph.nodes)
            if graph.unknown:
                cause = self._checker.difference
            if cause is not None and cause.kind == "operators" and not self._forward.grad_mode:
                # Without a checkpoint the block runs with gradients, as this recompute does.
                cause = None if self._comes_to_the_same(results) else cause
            if cause is not None:
                used = arrives(output, self._around) if len(outputs) > 1 else _always
                self._possible.append((used, cause))

    def shown(self) -> Shown:
        """The outcome, when the recompute has ended."""
        checker, forward = self._checker, self._forward
        if self.handed is not None:
            self.handed.run = None
        possible = self._possible
        if possible is None:  # the tensors that the backward pass uses cannot be seen
            possible = [(_always, one) for one in (checker.difference,) if one is not None]
        for place, maker, print_ in self._differing:
            cause = checker.cause_of_saved(maker, print_)
            if cause is not None and forward.handed is not None:
                used = functools.partial(forward.handed.used.__contains__, place)
                possible.append((used, cause))
        return Shown(
            forward.number,
            self.grad_mode,
            checker.compared,
            checker.random,
            checker.differing,
            checker.rounding,
            checker.lost,
            tuple((used, _explained(one, forward, self._drawn_from)) for used, one in possible),
        )


def _always() -> bool:
    return True


def _known(values: Iterable[_T | None]) -> list[_T]:
    return [one for one in values if one is not None]


def _explained(
    difference: Difference, forward: ForwardRun, drawn_from: dict[str, int]
) -> Difference:
    """The difference, put down to Python's random numbers where no operator explains it."""
    if difference.kind not in ("operators", "value", "argument", "input", "shape"):
        return difference
    other = [name for name, state in forward.drew.items() if drawn_from.get(name) != state]
    return replace(difference, kind="random", generator=other[0]) if other else difference
