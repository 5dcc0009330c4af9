"""Recomputes in the sequence of all kernels, where attention's main kernels say where they are.

A recompute launches the forward pass's kernels again in the forward pass's order. Around each
attention forward that ran again the kernels before and after it are compared, by name, with those
around its first run; as long as they agree they are the recompute's. Matrix products have the same
names in both directions, so nothing is a recompute here that is not in one piece with a counted
forward kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from msgspec import Struct

from recompute_scan.model import Kernels
from recompute_scan.recompute.attention.passes import BACKWARD, FORWARD, RECOMPUTE, Pass
from recompute_scan.trace.columns import Bool, Int64, Kind, Trace

# So many kernels that agree with those around the expected original leave no doubt that it is it.
_ENOUGH = 2


class KernelSequence(Struct, frozen=True):
    """The kernels of the stream that attention runs on, in order.

    ``token`` is one number per name; ``time`` is to the start of the next, ns.
    """

    rows: Int64
    token: Int64
    start: Int64
    time: Int64

    def places(self, rows: Int64) -> Int64:
        """Where these kernels are in the sequence, by their positions in :class:`Kernels`."""
        return self.rows.searchsorted(rows)


def kernel_sequence(trace: Trace, kernels: Kernels, attention: Int64) -> KernelSequence:
    """The kernels of the stream, or streams, that attention ran on."""
    stream = trace.thread[kernels.event]
    mine = np.isin(stream, np.unique(stream[attention])) & (
        trace.kind[kernels.event] == Kind.KERNEL
    )
    mine[attention] = True
    rows = np.flatnonzero(mine)
    event = kernels.event[rows]
    start = kernels.start[rows]
    time = np.append(np.diff(start), kernels.end[rows[-1:]] - start[-1:])
    return KernelSequence(rows, trace.name[event].astype(np.int64), start, time)


def with_recomputes(events: Sequence[str], passes: Sequence[Pass]) -> list[str] | None:
    """The events with recomputes told from the forward pass where only their order tells them.

    A forward pass is as many forwards as its backward pass has backwards; further ones before the
    first backward, and all between backwards, are recomputes. ``None`` where passes differ in
    length.
    """
    layers = {each.layers for each in passes}
    if RECOMPUTE in events or not layers:
        return list(events)
    if len(layers) > 1:
        return None
    (each,) = layers
    found: list[str] = []
    waiting: list[int] = []
    backwards = each
    for event in events:
        found.append(event)
        if event != BACKWARD:
            waiting.append(len(found) - 1)
            continue
        begins = len(waiting) >= each and backwards >= each
        for row in waiting[each:] if begins else waiting:
            found[row] = RECOMPUTE
        backwards = 1 if begins else backwards + 1
        waiting = []
    return found


def recomputed(sequence: KernelSequence, at: Int64, events: list[str], highest: int) -> Int64:
    """For each kernel: which it repeats, -1 for none."""
    token = sequence.token
    repeats = np.full(len(token), -1, np.int64)
    limits = _limits(at, events)
    before = 0
    least: dict[int, int] = {}
    for number, layer, originals in sorted(_layers(events, highest)):
        here, (low, high) = int(at[number]), limits[number]
        places = [int(at[original]) for original in originals]
        # Of recomputes in a row, equal layers hide where one ends; each begins as the first does.
        # Where the backward pass before it ends as a layer does, it seems to begin earlier.
        if not number or events[number - 1] != RECOMPUTE:
            before = here - _run_of(token, here, places, layer, (low, here + 1))[0]
            if highest > 1 and len(set(np.diff(places).tolist())) == 1:
                before = least[places[0]] = min(before, least.get(places[0], before))
        low = max(low, here - before)
        if events[number + 1 : number + 2] == [RECOMPUTE]:
            high = max(here + 1, min(high, int(at[number + 1]) - before))
        first, last, origin = _run_of(token, here, places, layer, (low, high))
        _fill(repeats, first, last, origin - here)
    return repeats


def beyond_first(repeats: Int64, at: Int64, events: Sequence[str]) -> Bool:
    """For each kernel: did another one repeat the same before it, in the same backward pass?"""
    again = repeats >= 0
    rows = np.flatnonzero(again)
    ends = at[_turns(events)]
    run = repeats[rows] + len(repeats) * ends.searchsorted(rows)
    again[rows[np.unique(run, return_index=True)[1]]] = False
    return again


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


def _fill(repeats: Int64, first: int, last: int, away: int) -> None:
    """What a run repeats, where that is not known yet."""
    rows = np.arange(first, last)
    rows = rows[repeats[rows] < 0]
    repeats[rows] = rows + away


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
            yield from _assigned(list(found), layer, max(1, size), highest, originals)
        # A second loss, or a micro-batch that waited, goes through the layers again.
        layer = layer - size if layer >= size else len(originals) - 1
        place = max(group, place + 1)


def _assigned(
    found: list[int], layer: int, size: int, highest: int, originals: list[int]
) -> Iterator[tuple[int, int, list[int]]]:
    if highest and len(found) % highest == 0:
        size = min(size, len(found) // highest)  # what has not run again has backwards here, too
    size = min(size, len(found))
    rest = len(found) - size
    chunk = size if rest == (highest - 1) * size else max(1, min(rest, layer + 1))
    for back, number in enumerate(reversed(found)):
        step = back if back < size else (back - size) % chunk
        yield number, max(0, layer - step), originals


def _limits(at: Int64, events: Sequence[str]) -> list[tuple[int, int]]:
    """For each event: how far around it a recompute can reach, without the events beside it."""
    found = []
    for number in range(len(events)):
        low = int(at[number - 1]) + 1 if number else 0
        high = int(at[number + 1]) if number + 1 < len(events) else int(at[number]) + 1
        found.append((low, high))
    return found


def _run_of(
    token: Int64, at: int, originals: Sequence[int], layer: int, limits: tuple[int, int]
) -> tuple[int, int, int]:
    """The run around ``at`` that equals one around an original: first, end, and that original.

    Of equal layers it is the one expected; another only if twice as much agrees with it.
    """
    expected = originals[layer]
    best = _equal(token, at, expected, limits)
    if best[1] - best[0] > _ENOUGH:
        return *best, expected
    for origin in originals:
        other = _equal(token, at, origin, limits)
        if other[1] - other[0] > 2 * (best[1] - best[0]):
            best, expected = other, origin
    return *best, expected


def _equal(token: Int64, at: int, origin: int, limits: tuple[int, int]) -> tuple[int, int]:
    low, high = limits
    if token[origin] != token[at]:
        return at, at + 1
    away = origin - at
    first, last = at, at + 1
    while first > low and first + away > 0 and token[first - 1] == token[first - 1 + away]:
        first -= 1
    while last < high and last + away < at and token[last] == token[last + away]:
        last += 1
    return first, last


def spans_of(at: Int64, events: Sequence[str], forward: bool, size: int) -> Bool:
    """For each kernel: is it between the first and last event of a forward, or a backward, pass?"""
    found = np.zeros(size, np.bool_)
    for mine, run in groupby(zip(at.tolist(), events, strict=True), lambda e: e[1] == FORWARD):
        places = [place for place, _ in run]
        if mine == forward:
            found[places[0] : places[-1] + 1] = True
    return found


def spans_beside(at: Int64, events: Sequence[str], size: int) -> tuple[Bool, Bool]:
    """The spans of forward and of backward passes, recomputes not counted as either's events."""
    kept = [row for row, event in enumerate(events) if event != RECOMPUTE]
    rest = [events[row] for row in kept]
    return spans_of(at[kept], rest, True, size), spans_of(at[kept], rest, False, size)
