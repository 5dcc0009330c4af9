"""Whether what did not run again are layers without a checkpoint, or what a model has once.

A norm behind the last layer, a stem, or what makes an image smaller between two stages has kernels
of the layers' kinds, but not so many in the same order. A model has a layer more than once. Several
short things in a row are as long together as one long one: they may be layers, or heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from recompute_scan.arrays import among, true_at
from recompute_scan.model import Kernels
from recompute_scan.recompute.attention.kernel_evidence import KernelEvidence
from recompute_scan.recompute.attention.passes import FORWARD
from recompute_scan.recompute.attention.sequence import (
    kernel_sequence,
    recomputed,
    with_recomputes,
)
from recompute_scan.result import Verdict
from recompute_scan.trace.columns import Bool, Int64, Trace

# As long a part of a recompute, twice in a forward pass and not run again, is one of layers.
_PART = 0.5


def leaves_layers(
    trace: Trace, kernels: Kernels, found: KernelEvidence, readings: Sequence[KernelEvidence]
) -> Verdict | None:
    """``partial`` where layers, or longer parts of them, do not run again, and others do once.

    Around each counted kernel that did not run again, the kernels that did not either are compared
    with those around each further counted one of its forward pass. Else ``full``; ``inconclusive``
    where shorter things follow one another, ``None`` where passes differ in length.

    Args:
        trace: The trace.
        kernels: Its device work.
        found: Of the readings the one that tells most.
        readings: All that can be read.
    """
    rows = np.unique(np.concatenate([one.rows for one in readings]))
    sequence = kernel_sequence(trace, kernels, rows)
    at = sequence.places(found.rows)
    events = with_recomputes(found.events, found.passes)
    if events is None:
        return None
    again, repeated = np.zeros((2, len(sequence.rows)), np.bool_)
    for one in readings:
        told = with_recomputes(one.events, one.passes) if one.judgement.highest else None
        if told is not None:
            repeats = recomputed(sequence, sequence.places(one.rows), told, 1)
            again |= repeats >= 0
            repeated[repeats[repeats >= 0]] = True
    left = ~(repeated | again)
    runs = int((again[:-1] & ~again[1:]).sum())
    long = _PART * int(again.sum()) / max(1, runs)
    begun = repeated & ~np.roll(repeated, 1)
    pieces: Int64 = begun.cumsum(dtype=np.int64)
    forwards = [one.rows[[event == FORWARD for event in one.events]] for one in readings]
    counted = true_at(among(sequence.rows, np.concatenate(forwards)))
    seen = set[bytes]()
    in_a_row = False
    low = 0
    for forward, run in groupby(zip(at.tolist(), events, strict=True), lambda e: e[1] == FORWARD):
        places = [place for place, _ in run]
        if not forward:
            low = places[-1] + 1
            continue
        later = at[at.searchsorted(places[-1] + 1) :][:1].tolist()
        here = slice(low, later[0] if later else len(left))
        token = sequence.token[here]
        same = np.concatenate((token, left[here])).tobytes()
        if same not in seen:
            seen.add(same)
            inside = counted[slice(*counted.searchsorted([here.start, here.stop]))] - low
            for length, away in _standing_twice(token, left[here], pieces[here], inside.tolist()):
                if min(length, away) >= long:
                    return "partial"
                in_a_row |= length >= long
    return "inconclusive" if in_a_row else "full"


def _standing_twice(
    token: Int64, left: Bool, pieces: Int64, places: list[int]
) -> Iterator[tuple[int, int]]:
    """Of what is left around one of these places and around another, too: how many kernels these
    are, and how far away.

    The other is of what ran again; or at most one piece that did is between, as where halves of
    layers do. A model that is called twice has a row of layers between its heads.
    """
    for place in places:
        if not left[place]:
            continue
        for other in places:
            if other == place or token[other] != token[place]:
                continue
            if left[other] and abs(int(pieces[other] - pieces[place])) > 1:
                continue
            away = other - place
            low, high = max(0, -away), min(len(token), len(token) - away)
            equal = left[low:high] & (token[low:high] == token[low + away : high + away])
            differ = np.flatnonzero(~equal) + low
            until = int(differ.searchsorted(place))
            first = int(differ[until - 1]) + 1 if until else low
            last = int(differ[until]) if until < len(differ) else high
            yield last - first, abs(away)
