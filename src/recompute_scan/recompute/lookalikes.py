"""What looks like a checkpointed block, and what repeats where nothing is checkpointed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recompute_scan.recompute.spans import Span
from recompute_scan.trace.columns import Bool, Int64

# Sequences shorter than this look like too much else, unless they stand in a row with blocks.
SHORTEST_LOOKALIKE = 3
# One operator alone is like too many even there.
_SHORTEST_IN_ROW = 2
# A repeated pattern must make up this much of a forward pass to be its layers.
REPEATS_COVER = 0.5


def patterns_of(spans: Sequence[Span], code: Int64) -> list[Int64]:
    """The different sequences of these, as codes of operators, the longest first."""
    distinct: dict[bytes, Int64] = {}
    for span in spans:
        pattern = code[span.first : span.last + 1]
        if len(pattern) >= _SHORTEST_IN_ROW:
            distinct.setdefault(pattern.tobytes(), pattern)
    # The longest first, so that a sequence is claimed whole.
    return sorted(distinct.values(), key=len, reverse=True)


def lookalikes(
    patterns: Sequence[Int64], known: Sequence[Span], code: Int64, counted: Bool, here: Int64
) -> list[Span]:
    """Sequences of one forward pass that look like a block, lie in none and have a backward.

    Args:
        patterns: What blocks look like.
        known: The blocks of this forward pass.
        code: One number per operator of all forward passes.
        counted: Which of these have a backward.
        here: Places of this forward pass's.
    """
    taken = np.zeros(len(code), np.bool_)
    for span in known:
        taken[span.first : span.last + 1] = True
    found: list[Span] = []
    first, last = int(here[0]), int(here[-1])
    for pattern in patterns:
        starts = np.flatnonzero(code[first : last + 1] == pattern[0]) + first
        if len(pattern) < SHORTEST_LOOKALIKE:
            starts = _in_row(starts, pattern, known, code)
        for start in starts:
            stop = int(start) + len(pattern)
            if stop - 1 > last or taken[start:stop].any() or not counted[start:stop].any():
                continue
            if np.array_equal(code[start:stop], pattern):
                taken[start:stop] = True
                found.append(Span(int(start), stop - 1, ()))
    return found


def _in_row(starts: Int64, pattern: Int64, known: Sequence[Span], code: Int64) -> Int64:
    """Those starts of the pattern that follow on its blocks no further off than these stand apart,
    in either direction.
    """
    length = len(pattern)
    starts = starts[starts <= len(code) - length]
    for place, kind in enumerate(pattern):
        starts = starts[code[starts + place] == kind]
    alike = starts.tolist()
    row = {span.first for span in known}.intersection(alike)
    far = min(np.diff(np.array(sorted(row), np.int64)).tolist(), default=length)
    for order in (alike, alike[::-1]):
        last = -1 - far
        for start in order:
            if start in row or length <= abs(start - last) <= far:
                row.add(start)
                last = start
    return np.array(sorted(row), np.int64)


def repeats(code: Int64, here: Int64) -> list[Span]:
    """The layers of a forward pass without checkpoints: its longest repeated pattern."""
    part = code[here]
    best: tuple[int, int, int] | None = None  # operators covered, start, period
    for period in _likely_periods(part):
        equal = np.concatenate(([False], part[period:] == part[:-period], [False]))
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            covered = (int(end - begin) // period + 1) * period
            if end - begin >= period and (best is None or covered > best[0]):
                best = (covered, int(begin), period)
    if best is None or best[0] < REPEATS_COVER * len(part):
        return []
    covered, begin, period = best
    return [
        Span(int(here[start]), int(here[start + period - 1]), ())
        for start in range(begin, begin + covered, period)
    ]


def _likely_periods(part: Int64) -> list[int]:
    """Distances at which operators of the rarest repeated kinds return, commonest first."""
    order = part.argsort(kind="stable")
    same = part[order][1:] == part[order][:-1]
    distances = np.diff(order)[same]
    distances = distances[distances >= SHORTEST_LOOKALIKE]
    values, times = np.unique(distances, return_counts=True)
    return [int(value) for value in values[np.argsort(-times, kind="stable")][:12]]
