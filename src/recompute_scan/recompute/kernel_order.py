"""Recomputes read off the order of attention's kernels.

Within one backward pass, each attention backward (B) may have attention forwards (F) right
before it: the recompute of its layer, or of a group of layers that ends with it. Between the
forward and the backward pass stand the originals. So a pass through four layers reads::

    F F F F   B B B B           m = 0
    F F F F   F B F B F B F B   m = 1, a checkpoint a layer
    F F F F   F F B B F F B B   m = 1, a checkpoint around two layers
    F F F F   F F B F F B …     m = 2

The launching thread separates the forward pass from recomputes where it can: on a GPU,
autograd launches from other threads. Without that, by the period, and by where the
backward pass begins: kernels that are named after it come between the two (``|``)::

    F F F F | F F F F F B F B F B F B   m = 2, a checkpoint a layer and one around all
    F F F F F F F F | B B B B           evaluation, or another model: unknown

Attention's main kernels say where recomputes are in the sequence of all kernels. A recompute
launches the forward pass's kernels again in the forward pass's order. Around each
attention forward that ran again the kernels before and after it are compared, by name, with those
around its first run; as long as they agree they are the recompute's. Matrix products have the same
names in both directions, so nothing is a recompute here that is not in one piece with a counted
forward kernel.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, groupby

import numpy as np
from msgspec import Struct

from recompute_scan.trace.calls import Kernels
from recompute_scan.trace.columns import Bool, Int64, Kind, Trace

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
        if not self.again or self._once():
            return int(self.again > 0)
        behind = accumulate(reversed(self.recomputes))
        return max(2, *(math.ceil(number / layers) for layers, number in enumerate(behind, 1)))

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
    and no backward of it followed: no checkpoint does that, a hook that runs a module does.

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
    least that many, and between these runs the same numbers of F. All F before the first B of
    a pass beyond the F that the pass needs are recomputes, where a kernel named after the backward
    pass parts the two. Where none does, these must be no more than the recomputes seen later in the
    pass: a further forward pass, and a recompute of the whole model, look alike. So do a forward
    pass later on and the recompute of several layers: then there is no answer.

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
    """Events between two B: ``gaps`` has what is before each F, and before the second B."""

    gaps: tuple[Collection[int], ...]

    @property
    def number(self) -> int:
        """How many F."""
        return len(self.gaps) - 1

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
    for place in range(1, layers):
        # May another pass, with another forward pass, be there up to the end? It has more F than
        # any other recompute.
        rest, mine = layers - place, numbers[place]
        others = (*numbers[1:place], *numbers[place + 1 :])
        if rest >= _FEWEST_LAYERS and mine >= rest and mine > max(others):
            return None
    found = []
    for first, *_ in passes:
        recomputes = first.number - layers
        parted = first.parted < first.number
        if first.parted != layers if parted else recomputes > max(numbers[1:]):
            return None
        found.append(Pass((recomputes, *numbers[1:])))
    return found


def with_recomputes(events: Sequence[str], passes: Sequence[Pass]) -> list[str] | None:
    """The events, with recomputes found by their order where threads do not show them.

    A forward pass is as many forwards as its backward pass has backwards; further ones before the
    first backward, and all between backwards, are recomputes. ``None`` where passes differ in
    length.
    """
    found, layers = list(events), {each.layers for each in passes}
    if RECOMPUTE in events or not layers:
        return found
    if len(layers) > 1:
        return None
    (each,) = layers
    waiting: list[int] = []
    backwards = each
    for place, event in enumerate(events):
        if event != BACKWARD:
            waiting.append(place)
            continue
        begins = len(waiting) >= each and backwards >= each
        for row in waiting[each:] if begins else waiting:
            found[row] = RECOMPUTE
        backwards = 1 if begins else backwards + 1
        waiting = []
    return found


class KernelSequence:
    """The kernels of the stream, or streams, that attention runs on, in order.

    Attributes:
        rows: Their positions in :class:`Kernels`.
        token: One number per name.
        start: When each began, ns.
        time: To the start of the next, ns.
        at: Where attention's main kernels are in the sequence.
        events: What each of these is; recomputes are known.
        repeats: For each kernel: which it repeats, -1 for none.
    """

    def __init__(
        self, trace: Trace, kernels: Kernels, attention: Int64, events: list[str], highest: int
    ) -> None:
        stream = trace.thread[kernels.event]
        mine = np.isin(stream, np.unique(stream[attention]))
        mine &= trace.kind[kernels.event] == Kind.KERNEL
        mine[attention] = True
        self.rows = np.flatnonzero(mine)
        self.token = trace.name[kernels.event[self.rows]].astype(np.int64)
        self.start = kernels.start[self.rows]
        last = kernels.end[self.rows[-1:]] - self.start[-1:]
        self.time = np.append(np.diff(self.start), last)
        self.at = self.rows.searchsorted(attention)
        self.events = events
        self.repeats = np.full(len(self.token), -1, np.int64)
        self._find_repeats(highest)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def again(self) -> Bool:
        """For each kernel: does it repeat one?"""
        return self.repeats >= 0

    def _find_repeats(self, highest: int) -> None:
        before = 0
        least: dict[int, int] = {}
        for number, layer, originals in sorted(_layers(self.events, highest)):
            here = int(self.at[number])
            # It reaches as far as the events next to it.
            low = int(self.at[number - 1]) + 1 if number else 0
            high = int(self.at[number + 1]) if number + 1 < len(self.at) else here + 1
            places = [int(self.at[original]) for original in originals]
            # Of recomputes in a row, equal layers hide where one ends; each begins as the first
            # does. Where the backward pass before it ends as a layer does, it seems to begin
            # earlier.
            if not number or self.events[number - 1] != RECOMPUTE:
                before = here - self._equal(here, places[layer], low, here + 1)[0]
                if highest > 1 and len(set(np.diff(places).tolist())) == 1:
                    before = least[places[0]] = min(before, least.get(places[0], before))
            low = max(low, here - before)
            if self.events[number + 1 : number + 2] == [RECOMPUTE]:
                high = max(here + 1, min(high, int(self.at[number + 1]) - before))
            rows = np.arange(*self._equal(here, places[layer], low, high))
            rows = rows[self.repeats[rows] < 0]
            self.repeats[rows] = rows + places[layer] - here

    def _equal(self, at: int, origin: int, low: int, high: int) -> tuple[int, int]:
        """The run around ``at`` that equals one around ``origin``: its first kernel and its end."""
        token, away = self.token, origin - at
        first, last = at, at + 1
        if token[origin] != token[at]:
            return first, last
        while first > low and first + away > 0 and token[first - 1] == token[first - 1 + away]:
            first -= 1
        while last < high and last + away < at and token[last] == token[last + away]:
            last += 1
        return first, last

    def beyond_first(self) -> Bool:
        """For each kernel: did another repeat the same before it, in the same backward pass?"""
        again = self.again
        rows = np.flatnonzero(again)
        ends = self.at[_turns(self.events)]
        run = self.repeats[rows] + len(self) * ends.searchsorted(rows)
        again[rows[np.unique(run, return_index=True)[1]]] = False
        return again

    def spans(self) -> tuple[Bool, Bool]:
        """For each kernel: is it between the first and last event of a forward; of a backward pass?

        Recomputes are not counted as either's events.
        """
        found = np.zeros((2, len(self)), np.bool_)
        both = zip(self.at.tolist(), self.events, strict=True)
        kept = [each for each in both if each[1] != RECOMPUTE]
        for event, run in groupby(kept, lambda each: each[1]):
            places = [place for place, _ in run]
            found[int(event == BACKWARD), places[0] : places[-1] + 1] = True
        return found[0], found[1]


def _turns(events: Sequence[str]) -> list[int]:
    """The last event of each backward pass: it has as many backwards as there are forwards."""
    found, forward, backward = [], 0, 0
    for number, event in enumerate(events):
        if event == FORWARD:
            goes_on = number > 0 and events[number - 1] == FORWARD
            forward, backward = forward + 1 if goes_on else 1, 0
        elif event == BACKWARD:
            backward += 1
            if backward == forward or events[number + 1 : number + 2] == [FORWARD]:
                found.append(number)
                backward = 0 if backward == forward else backward
    return found


def _layers(events: Sequence[str], highest: int) -> Iterator[tuple[int, int, list[int]]]:
    """For each recompute: its event, the layer it repeats, and the events of the forward pass.

    Recomputes before some backwards repeat the layers of these, in order; those before them the
    same layers, or, where their number is another, all layers up to the last of these.
    """
    originals: list[int] = []
    layer, place = 0, 0
    while place < len(events):
        if events[place] == FORWARD:
            if place and events[place - 1] != FORWARD:
                originals = []
            originals.append(place)
            layer = len(originals) - 1
            place += 1
            continue
        stop = place
        while stop < len(events) and events[stop] == RECOMPUTE:
            stop += 1
        group = stop
        while group < len(events) and events[group] == BACKWARD:
            group += 1
        found, size = range(place, stop), group - stop
        if originals and found:
            for number, again in _assigned(list(found), layer, max(1, size), highest):
                yield number, again, originals
        # A second loss, or a micro-batch that waited, goes through the layers again.
        layer = layer - size if layer >= size else len(originals) - 1
        place = max(group, place + 1)


def _assigned(found: list[int], layer: int, size: int, highest: int) -> Iterator[tuple[int, int]]:
    if highest and len(found) % highest == 0:
        size = min(size, len(found) // highest)  # what has not run again has backwards here, too
    size = min(size, len(found))
    rest = len(found) - size
    chunk = size if rest == (highest - 1) * size else max(1, min(rest, layer + 1))
    for back, number in enumerate(reversed(found)):
        step = back if back < size else (back - size) % chunk
        yield number, max(0, layer - step)
