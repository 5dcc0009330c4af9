"""A recompute compared with its forward.

A recompute against its forward: which results are the same, and where the first one is not.

How two calls of one operator differ: in their results, in what they got, and why, as far as
that tells.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal

from msgspec import Struct

from recompute_scan.fidelity.tape import Outside, TapeEntry
from recompute_scan.fidelity.tensors import Fingerprint
from recompute_scan.result.fidelity import Difference, DifferenceKind, LostGradient, Operation

Prints = tuple[Fingerprint | None, ...]


def cause_between(twin: TapeEntry, entry: TapeEntry) -> tuple[DifferenceKind, dict[str, Any]]:
    """Why two calls of one operator have different results, as far as their arguments tell."""
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
    """What the recompute's call got from outside the region that the forward's did not."""
    if not twin.outside:
        return []
    after = {one.place: one for one in entry.outside}
    pairs = ((before, after.get(before.place)) for before in twin.outside)
    return [
        now.print
        for before, now in pairs
        if now is not None and now.print is not None and not same_from_outside(before, now)
    ]


def other_in(twin: TapeEntry, entry: TapeEntry, what: str) -> dict[str, str] | None:
    for one, other in zip(twin.prints, entry.prints, strict=False):
        if one is None or other is None:
            continue
        before, after = getattr(one, what), getattr(other, what)
        if before != after:
            return {"forward": _plain(before), "recompute": _plain(after)}
    return None


def _plain(value: object) -> str:
    return str(value).removeprefix("torch.")


def same_from_outside(before: Outside, now: Outside) -> bool:
    if before.print is None or now.print is None:
        return True  # not known to differ
    return not differ(before.print, now.print)


def differ(one: Fingerprint | None, other: Fingerprint | None) -> bool:
    """Are both known, and further apart than rounding explains?"""
    if one is None or other is None or one.same_bits(other):
        return False
    if one.dtype != other.dtype or not (one.dtype.is_floating_point or one.dtype.is_complex):
        return True
    distance = one.distance(other)
    return distance is None or distance > one.rounding()


def apart_by(before: Prints, now: Prints) -> str | None:
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
# Makes a call once more: the fingerprint of its first result, where that changes nothing.
_Repeat = Callable[[], Fingerprint | None]
Why = Literal["grad-mode-off", "detached"]


class _Suspect(Struct, frozen=True):
    """A call whose result differs.

    Attributes:
        twin: Place of the forward's call.
        cause: Why: its own difference, or that of what it was given.
        own: Whether the difference is its own.
        entry: The call.
    """

    twin: int
    cause: Difference
    own: bool
    entry: TapeEntry


class Checker:
    """Goes along the forward's calls while the recompute makes its own.

    Which of the results that differ change a gradient is for
    :mod:`recompute_scan.fidelity.backward_reads` to say, where it can see what the backward pass
    uses. Where it cannot, one counts on which a gradient can depend: where autograd runs through
    the call, or through what is made of its result, as far as that differs too.

    Attributes:
        compared: Results that were compared.
        random: Of these, drawn ones.
        rounding: Largest distance of one that differs by rounding only.
    """

    def __init__(
        self, forward: list[TapeEntry], parameters: Callable[[], dict[int, str]], *, grad_mode: bool
    ) -> None:
        self._forward = forward
        self._parameters = parameters
        self._grad_mode = grad_mode
        self._next = 0
        self._unmatched: Difference | None = None
        self._strays: dict[int, _Suspect] = {}
        self._changed: dict[object, Difference] = {}
        self._found: Difference | None = None
        self._suspected: dict[int, _Suspect] = {}
        self._aside: dict[int, Difference] = {}
        self._faint: dict[int, Difference] = {}
        self._written: Difference | None = None
        self._lost: dict[str, LostGradient] = {}
        self.compared = 0
        self.random = 0
        self.rounding: float | None = None

    def meet(self, entry: TapeEntry, where: Callable[[], Operation], repeat: _Repeat) -> None:
        """The recompute has made a call.

        Args:
            entry: The call.
            where: Tells where it is; asked of a call that is not the forward's only.
            repeat: Makes the call once more and gives the fingerprint of its first result;
                ``None`` where that cannot be done without changing anything.
        """
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
        changed: list[Fingerprint] = []
        if twin.outside:
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
            for one in changed:
                self._changed.setdefault((one.bits, one.shape), cause)
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
            self._note_rounding(twin, entry)
            source = self._cause_of(entry)
            if source is not None:
                self._faint[entry.place] = source  # a finer type shows it again
        if entry.differentiable and self._found is None:
            self._found = self._cause_in(entry.sources)

    def _cause_of(self, entry: TapeEntry) -> Difference | None:
        """The difference of what a call that differs was given, if any."""
        beside = self._aside | self._faint if self._aside or self._faint else self._aside
        others = (beside[one] for one in sorted(entry.sources) if one in beside)
        return self._cause_in(entry.sources) or next(others, None)

    def _cause_in(self, places: Collection[int]) -> Difference | None:
        suspected = self._suspected
        first = (
            min((one for one in places if one in suspected), default=None) if suspected else None
        )
        return suspected[first].cause if first is not None else None

    @property
    def differing(self) -> int:
        """How many results differ, by more than rounding."""
        return len(self._suspected)

    def cause_of_saved(self, maker: int | None, print_: Fingerprint) -> Difference | None:
        """Why a tensor differs that this call made, or a view of it; ``None`` if nobody knows.

        Asked when the recompute has ended.

        Args:
            maker: The call; ``None`` of a tensor from outside.
            print_: The tensor's fingerprint.
        """
        if maker is None:
            return self._changed.get((print_.bits, print_.shape))
        cause = self._cause_in((maker,))
        aside = self._aside.get(maker)
        if cause is None and aside is not None:
            # What it holds beside the result may be padding, unless it was drawn.
            return aside if aside.kind == "random" else None
        if cause is None and maker in self._strays:
            cause = self._strays[maker].cause
        views = (one.cause for one in self._suspected.values() if maker in one.entry.sources)
        return cause or next(views, None)

    def cause_in_graph(
        self,
        makers: Collection[int],
        outside: Collection[Fingerprint],
        nodes: Collection[int],
    ) -> Difference | None:
        """The first difference of what a recomputed graph holds.

        Args:
            makers: The calls that made what its nodes have saved.
            outside: Of what else they have saved, the fingerprints.
            nodes: The numbers of its nodes.
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
        """The first result that matters and that the forward did not have; once it has ended.

        A recompute may stop where a tensor is kept for the backward, before the call that it is
        kept by: what that would have been given, the forward tells.
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

    def _other_operator(self, entry: TapeEntry, where: Callable[[], Operation]) -> Difference:
        forward = self._forward
        for twin in forward[self._next : self._next + _LOOKAHEAD]:
            types = other_in(twin, entry, "dtype") if twin.kind is entry.kind else None
            if types is not None and other_in(twin, entry, "shape") is None:
                return Difference(
                    "type", where(), forward=types["forward"], recompute=types["recompute"]
                )
        expected = forward[self._next].kind.name if self._next < len(forward) else None
        return Difference("operators", where(), instead_of=expected)

    def _note_rounding(self, twin: TapeEntry, entry: TapeEntry) -> None:
        for one, other in zip(twin.prints, entry.prints, strict=False):
            if one is not None and other is not None and not one.same_bits(other):
                self.rounding = max(self.rounding or 0.0, one.distance(other) or 0.0)

    def _see_gradients(
        self, twin: TapeEntry, entry: TapeEntry, where: Callable[[], Operation]
    ) -> None:
        after = {one.place: one for one in entry.outside}
        for before in twin.outside:
            now = after.get(before.place)
            if not before.needs_gradient or now is None or before.print is None:
                continue
            if self._grad_mode and (now.needs_gradient or not same_from_outside(before, now)):
                continue
            name, operation = self._parameters().get(before.tensor_id, ""), where()
            why: Why = "detached" if self._grad_mode else "grad-mode-off"
            self._lost.setdefault(name or operation.site, LostGradient(name, operation, why))

    @property
    def lost(self) -> tuple[LostGradient, ...]:
        """Tensors that need a gradient in the forward, and get none through the recompute."""
        return tuple(self._lost.values())

    def _difference(
        self, twin: TapeEntry, entry: TapeEntry, where: Callable[[], Operation], repeat: _Repeat
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
