"""Recomputes of attention read off the order in which its forward and backward kernels ran.

Within one backward pass, each attention backward (B) may have attention forwards (F) right
before it: the recompute of its layer, or of a group of layers that ends with it. Between the
forward and the backward pass stand the originals. So a pass through four layers reads::

    F F F F   B B B B           m = 0
    F F F F   F B F B F B F B   m = 1, a checkpoint a layer
    F F F F   F F B B F F B B   m = 1, a checkpoint around two layers
    F F F F   F F B F F B …     m = 2

What ran in the forward pass is told from recomputes by the launching thread where it can be: on a
GPU, autograd launches from threads of its own. Without that, by the period, and by where the
backward pass begins: kernels that are named after it come between the two (``|``)::

    F F F F | F F F F F B F B F B F B   m = 2, a checkpoint a layer and one around all
    F F F F F F F F | B B B B           evaluation, or another model: not told

Some of these kernels open a backward pass, as a loss's do: they are nowhere else in it. All
the forward pass is before them; where they return, another pass begins.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from msgspec import Struct

FORWARD, RECOMPUTE, BACKWARD = "F", "R", "B"
# One layer per pass has no order to go by: F F B is a recompute, or another forward pass.
_FEWEST_LAYERS = 2


class Pass(Struct, frozen=True):
    """One backward pass: how many attention forwards ran again right before each backward.

    ``recomputes`` has one entry per layer, in the order of the backward pass: last layer first.
    """

    recomputes: tuple[int, ...]

    @property
    def layers(self) -> int:
        """How many attention backwards ran."""
        return len(self.recomputes)

    @property
    def again(self) -> int:
        """How many attention forwards ran again."""
        return sum(self.recomputes)

    @property
    def highest(self) -> int:
        """The lowest number that the most recomputed layer can have run again.

        Recomputes before a layer's backward are of that layer, and maybe of those before it in the
        model; two checkpoints nest or are disjoint. As many as fit between two such places are
        read as one recompute of a group of layers.
        """
        if not self.again:
            return 0
        if self._once():
            return 1
        behind, densest = 0, 0.0
        for number, layers in zip(
            reversed(self.recomputes), range(1, self.layers + 1), strict=False
        ):
            behind += number
            densest = max(densest, behind / layers)
        return max(2, math.ceil(densest))

    @property
    def whole(self) -> bool:
        """Whether every layer ran again, each at least once."""
        return self.again >= self.layers and (not self._once() or self.again == self.layers)

    def _once(self) -> bool:
        starts = [place for place, number in enumerate(self.recomputes) if number]
        stops = [*starts[1:], self.layers]
        return all(
            self.recomputes[start] <= stop - start
            for start, stop in zip(starts, stops, strict=True)
        )


def passes_by_thread(events: Sequence[str], cut: bool = False) -> list[Pass] | None:
    """The backward passes in a sequence of ``F`` (forward pass), ``R`` (recompute) and ``B``.

    A new pass begins with the first B behind an F. ``None`` where attention ran in a backward pass
    and none of its backwards followed: no checkpoint does that, a hook that runs a module does.

    Args:
        events: In order of launch.
        cut: Whether the sequence may end within a pass.
    """
    passes: list[list[int]] = []
    recomputes, forward = 0, True
    for event in events:
        if event == FORWARD:
            if recomputes and passes:
                return None
            forward = True
        elif event == RECOMPUTE:
            recomputes += 1
        else:
            if forward:
                passes.append([])
            passes[-1].append(recomputes)
            recomputes, forward = 0, False
    return None if recomputes and not cut else [Pass(tuple(each)) for each in passes]


def passes_by_order(
    events: Sequence[str], cut: bool = False, named: Sequence[Collection[int]] = ()
) -> list[Pass] | None:
    """The backward passes in a sequence of ``F`` and ``B``, all of one length; else ``None``.

    The length is the shortest that repeats: every so many B, the longest run of F returns, of at
    least that many, and between these runs the same numbers of F. What comes before the first B of
    a pass beyond the F that the pass needs are recomputes, where a kernel named after the backward
    pass parts the two. Where none does, these must be no more than the recomputes seen later in the
    pass: a further forward pass, and a recompute of the whole model, look alike. So do a forward
    pass later on and the recompute of several layers, but for kernels that open a backward pass.

    Args:
        events: In order of time.
        cut: Whether the sequence may begin or end within a pass; such a pass is left out, even
            if it has all its B.
        named: For each event, the names of kernels named after the backward pass that ran between
            it and the event before. Empty where that is not known.
    """
    before: list[_Before] = []
    gaps: list[Collection[int]] = []
    for event, names in zip(events, named or [()] * len(events), strict=True):
        gaps.append(names)
        if event == BACKWARD:
            before.append(_Before(tuple(gaps)))
            gaps = []
    if len({each.number for each in before}) == 1 and before[0].number:
        return None  # every backward stands alone: one layer, or one layer's worth of recomputes
    for layers in range(_FEWEST_LAYERS, len(before) + 1):
        for first in range(layers + 1) if cut else (0,):
            found = _periodic(before[first:], layers, cut)
            if found is not None:
                return _read(found, layers)
    return None


class _Before(Struct, frozen=True):
    """What ran between two B: ``gaps`` has what is before each F, and before the second B."""

    gaps: tuple[Collection[int], ...]

    @property
    def number(self) -> int:
        """How many F."""
        return len(self.gaps) - 1

    @property
    def names(self) -> set[int]:
        """All kernels named after the backward pass."""
        return {name for gap in self.gaps for name in gap}

    def until(self, opening: set[int]) -> int:
        """How many F have one of these kernels behind them."""
        rows = (row for row, gap in enumerate(self.gaps) if not opening.isdisjoint(gap))
        return max(rows, default=0)

    @property
    def parted(self) -> int:
        """How many F are before the first kernel that parts them; all, where none does."""
        return next((row for row, gap in enumerate(self.gaps[:-1]) if row and gap), self.number)


def _periodic(before: list[_Before], layers: int, cut: bool) -> list[list[_Before]] | None:
    """The passes of that many layers: what is before each B; ``None`` if they differ."""
    whole, rest = divmod(len(before), layers)
    if not whole or (rest and not cut):
        return None
    passes = [before[place * layers : (place + 1) * layers] for place in range(whole)]
    numbers = [[each.number for each in one] for one in passes]
    if any(each[0] < max(layers, *each) or each != numbers[0] for each in numbers):
        return None
    return passes


def _read(passes: list[list[_Before]], layers: int) -> list[Pass] | None:
    numbers = [each.number for each in passes[0]]
    begins = [place for place in range(1, layers) if _may_begin(numbers, place)]
    opening = {name for one in passes for name in one[0].names}
    for one in passes:
        for place in set(range(1, layers)).difference(begins):
            opening -= one[place].names
    for one in passes if begins else ():
        again = set[int]().union(*(one[place].names for place in begins))
        if not one[0].until(opening) or not opening.isdisjoint(again):
            return None
    found = []
    for first, *_ in passes:
        recomputes = first.number - layers
        originals = first.until(opening) or first.parted
        told = originals < first.number or first.until(opening) > 0
        if originals != layers if told else recomputes > max(numbers[1:]):
            return None
        found.append(Pass((recomputes, *numbers[1:])))
    return found


def _may_begin(numbers: Sequence[int], place: int) -> bool:
    """May a pass of its own, with a forward pass of its own, be there up to the end?

    It has more F than any recompute beside it.
    """
    rest, mine = len(numbers) - place, numbers[place]
    others = (*numbers[1:place], *numbers[place + 1 :])
    return rest >= _FEWEST_LAYERS and mine >= rest and mine > max(others)
