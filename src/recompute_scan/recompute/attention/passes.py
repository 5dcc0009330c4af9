"""Recomputes of attention read off the order in which its forward and backward kernels ran.

Within one backward pass, each attention backward (B) may have attention forwards (F) right
before it: the recompute of its layer, or of a group of layers that ends with it. Between the
forward and the backward pass stand the originals. So a pass through four layers reads::

    F F F F   B B B B           m = 0
    F F F F   F B F B F B F B   m = 1, a checkpoint a layer
    F F F F   F F B B F F B B   m = 1, a checkpoint around two layers
    F F F F   F F B F F B …     m = 2

What ran in the forward pass is told from recomputes by the launching thread where it can be: on a
GPU, autograd launches from threads of its own. Without that, by the period alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def passes_by_thread(events: Sequence[str]) -> list[Pass]:
    """The backward passes in a sequence of ``F`` (forward pass), ``R`` (recompute) and ``B``.

    A new pass begins with the first B behind an F.
    """
    passes: list[list[int]] = []
    recomputes, forward = 0, True
    for event in events:
        if event == FORWARD:
            forward = True
        elif event == RECOMPUTE:
            recomputes += 1
        else:
            if forward:
                passes.append([])
            passes[-1].append(recomputes)
            recomputes, forward = 0, False
    return [Pass(tuple(each)) for each in passes]


def passes_by_order(events: Sequence[str], cut: bool = False) -> list[Pass] | None:
    """The backward passes in a sequence of ``F`` and ``B``, all of one length; else ``None``.

    The length is the shortest that repeats: every so many B, the longest run of F returns, of at
    least that many, and between these runs the same numbers of F. ``None`` as well where more F
    come before the first B of a pass than that pass needs with the recomputes seen in it: a further
    forward pass, and a recompute of the whole model, look alike.

    Args:
        events: In order of time.
        cut: Whether the sequence may begin or end within a pass; such a pass is left out, even
            if it has all its B.
    """
    before, waiting = [], 0
    for event in events:
        if event == BACKWARD:
            before.append(waiting)
            waiting = 0
        else:
            waiting += 1
    if len(set(before)) == 1 and before[0]:
        return None  # every backward stands alone: one layer, or one layer's worth of recomputes
    for layers in range(_FEWEST_LAYERS, len(before) + 1):
        for first in range(layers + 1) if cut else (0,):
            found = _periodic(before[first:], layers, cut)
            if found is not None:
                return [Pass(tuple(each)) for each in found] if _plain(found) else None
    return None


def _periodic(before: list[int], layers: int, cut: bool) -> list[list[int]] | None:
    whole, rest = divmod(len(before), layers)
    if not whole or (rest and not cut):
        return None
    passes = [before[place * layers : (place + 1) * layers] for place in range(whole)]
    if any(each[0] < max(layers, *each) or each != passes[0] for each in passes):
        return None
    return [[each[0] - layers, *each[1:]] for each in passes]


def _plain(passes: list[list[int]]) -> bool:
    return all(each[0] <= max(each[1:]) for each in passes)
