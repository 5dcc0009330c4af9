"""Where recomputes begin and end, once all that hold a counted kernel are known.

A recompute ends where that of the next layer begins: the backward pass goes on with products, and
one of these may have the name of what comes next in the forward pass. And some recomputes hold no
counted kernel, such as that of an MLP's own checkpoint; or are in several pieces, where a recompute
has a kernel more than the forward pass. They are found around kernels whose names say that they are
of the forward pass, by what they have in common with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from recompute_scan.arrays import among, true_at
from recompute_scan.recompute.attention.kernel_evidence import Directions
from recompute_scan.recompute.attention.passes import FORWARD, RECOMPUTE
from recompute_scan.trace.columns import Bool, Int64

# Fewer kernels that agree may be a gradient's own.
_SHORTEST = 3
# On either side of what ran again last, of so many places in the forward pass a piece is sought.
_MOST_PLACES = 16


def whole_recomputes(
    token: Int64, repeats: Int64, at: Int64, events: Sequence[str], told: Directions
) -> Int64:
    """For each kernel: which it repeats, -1 for none.

    Args:
        token: A number per name, in order.
        repeats: The same, as far as counted kernels tell.
        at: Where the counted kernels are.
        events: What they are.
        told: Directions of kernels, by token.
    """
    found: Int64 = repeats.copy()
    _cut(found, at, events)
    _close(token, found)
    forward, backward = (
        among(token, np.array(sorted(c for c, d in told.items() if d == way), np.int64))
        for way in ("forward", "backward")
    )
    behind = _in_backward(backward, at, events)
    first_runs = true_at(~behind)
    first_runs = first_runs[token[first_runs].argsort(kind="stable")]
    names = token[first_runs]
    known, mine = true_at(found >= 0), -1
    between = np.cumsum(~behind)
    for row in true_at(behind & forward).tolist():
        if found[row] >= 0:
            continue
        # It is sought first around what ran again last in this backward pass.
        last = max(mine, int(known[: known.searchsorted(row)][-1:].sum()))
        near = int(found[last]) if behind[last] and between[last] == between[row] else row
        places = first_runs[slice(*names.searchsorted([token[row], token[row] + 1]))]
        places = places[: places.searchsorted(row)]
        middle = int(places.searchsorted(near))
        places = places[max(0, middle - _MOST_PLACES) : middle + _MOST_PLACES]
        _find(token, found, behind, row, places[np.abs(places - near).argsort(kind="stable")])
        mine = row if found[row] >= 0 else mine
    return found


def _cut(repeats: Int64, at: Int64, events: Sequence[str]) -> None:
    """End each recompute before what another one begins with, in place."""
    ran = repeats >= 0
    goes_on = np.zeros(len(repeats), np.bool_)
    goes_on[1:] = ran[1:] & ran[:-1] & (repeats[1:] == repeats[:-1] + 1)
    begun = among(repeats, repeats[ran & ~goes_on]) & goes_on
    ends, cut = true_at(~goes_on), -1
    for place, event, following in zip(at.tolist(), events, (*events[1:], ""), strict=True):
        if event != RECOMPUTE or following == RECOMPUTE:
            continue
        stop = int(ends[ends.searchsorted(place + 1) :][:1].sum()) or len(repeats)
        if stop == cut:  # a counted kernel before this one has the first beginning behind it
            continue
        cut = stop
        cuts = true_at(begun[place + 1 : stop])
        if len(cuts):
            repeats[place + 1 + int(cuts[0]) : stop] = -1


def _close(token: Int64, repeats: Int64) -> None:
    """Go on with a recompute up to where the next one begins, in place.

    The first of several may seem to begin earlier than the others, which then end too early.
    """
    ran = repeats >= 0
    begun = set(repeats[1:][ran[1:] & (repeats[1:] != repeats[:-1] + 1)].tolist())
    for first in (true_at(ran[:-1] & ~ran[1:]) + 1).tolist():
        following = true_at(ran[first : first + _SHORTEST])[:1].tolist()
        for row in range(first, first + sum(following)):
            origin = int(repeats[row - 1]) + 1
            if origin in begun or origin <= 0 or token[row] != token[origin]:
                break
            repeats[row] = origin


def _in_backward(backward: Bool, at: Int64, events: Sequence[str]) -> Bool:
    """For each kernel: is it between the first kernel of a backward pass and its last?"""
    found = np.zeros(len(backward), np.bool_)
    known = backward.copy()
    known[at[[event != FORWARD for event in events]]] = True
    starts = at[[event == FORWARD for event in events]].tolist()
    for start, stop in pairwise([*starts, len(backward)]):
        rows = true_at(known[start:stop])
        if len(rows):
            found[start + int(rows[0]) : start + int(rows[-1]) + 1] = True
    return found


def _find(token: Int64, repeats: Int64, behind: Bool, row: int, places: Int64) -> None:
    """What repeats the forward pass around this kernel: the longest piece, the first of these."""

    def same(at: int, away: int) -> bool:
        inside = 0 <= at + away < at < len(token)
        return bool(
            inside
            and token[at] == token[at + away]
            and repeats[at] < 0
            and behind[at]
            and not behind[at + away]
        )

    best = (0, 0, 0)
    for place in places.tolist():
        first, last, away = row, row + 1, place - row
        while same(first - 1, away):
            first -= 1
        while same(last, away):
            last += 1
        if last - first > best[1] - best[0]:
            best = (first, last, away)
    first, last, away = best
    if last - first >= _SHORTEST:
        repeats[first:last] = np.arange(first, last) + away
