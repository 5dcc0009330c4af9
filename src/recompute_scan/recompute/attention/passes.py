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
backward pass begins: kernels that are named after it stand between the two (``|``)::

    F F F F | F F F F F B F B F B F B   m = 2, a checkpoint a layer and one around all
    F F F F F F F F | B B B B           evaluation, or another model: not told
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat

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
    events: Sequence[str], cut: bool = False, in_backward: Sequence[bool] = ()
) -> list[Pass] | None:
    """The backward passes in a sequence of ``F`` and ``B``, all of one length; else ``None``.

    The length is the shortest that repeats: every so many B, the longest run of F returns, of at
    least that many, and between these runs the same numbers of F. What comes before the first B of
    a pass beyond the F that the pass needs are recomputes, where a kernel named after the backward
    pass parts the two. Where none does, these must be no more than the recomputes seen later in the
    pass: a further forward pass, and a recompute of the whole model, look alike.

    Args:
        events: In order of time.
        cut: Whether the sequence may begin or end within a pass; such a pass is left out, even
            if it has all its B.
        in_backward: For each event, whether a kernel named after the backward pass ran between it
            and the event before. Empty where that is not known.
    """
    before: list[tuple[int, ...]] = []
    runs = [0]
    for event, parted in zip(events, in_backward or repeat(False), strict=False):
        if event == BACKWARD:
            before.append(tuple(run for run in runs if run))
            runs = [0]
        else:
            runs += [0] if parted else []
            runs[-1] += 1
    if len({sum(each) for each in before}) == 1 and before[0]:
        return None  # every backward stands alone: one layer, or one layer's worth of recomputes
    for layers in range(_FEWEST_LAYERS, len(before) + 1):
        for first in range(layers + 1) if cut else (0,):
            found = _periodic(before[first:], layers, cut)
            if found is not None:
                return _read(found, layers)
    return None


def _periodic(
    before: list[tuple[int, ...]], layers: int, cut: bool
) -> list[list[tuple[int, ...]]] | None:
    """The passes of that many layers: the runs of F before each B; ``None`` if they differ."""
    whole, rest = divmod(len(before), layers)
    if not whole or (rest and not cut):
        return None
    passes = [before[place * layers : (place + 1) * layers] for place in range(whole)]
    numbers = [[sum(runs) for runs in each] for each in passes]
    if any(each[0] < max(layers, *each) or each != numbers[0] for each in numbers):
        return None
    return passes


def _read(passes: list[list[tuple[int, ...]]], layers: int) -> list[Pass] | None:
    found = []
    for first, *rest in passes:
        later = [sum(runs) for runs in rest]
        recomputes = sum(first) - layers
        told = len(first) > 1
        if first[0] != layers if told else recomputes > max(later):
            return None
        found.append(Pass((recomputes, *later)))
    return found
