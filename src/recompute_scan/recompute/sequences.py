"""Operators of the backward pass matched with operators of the forward pass.

A node's operators are one sequence. The sequence is cut from its end into runs: operators in a row
that the forward pass has in the same row. A recompute goes through the forward pass from its first
operator to its last and may leave some out. Where the places stop rising, one recompute ends and
another begins.

Where layers are equal, a sequence can be one recompute of two layers or two recomputes of one. Two
facts decide:

* what the innermost checkpoint recomputes is not asked for again, so the last recompute begins
  behind the operator of the node that asks next;
* sequences of the same operators come from checkpoints of the same kind. Without early stop, a node
  asks for two runs of one layer, and the first layer's can be read in no other way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.trace.columns import Int64

# A shorter run is evidence only near the place where it is expected.
SHORT_RUN = 3
# How far from that place, in operators, a short run may end.
NEAR = 8
# Two layers of one kind, or two forward passes, differ by no more of their operators.
LIKE = 0.2


def alike(one: Int64, other: Int64) -> bool:
    """Do two sequences of codes begin alike and have about the same length?"""
    if abs(len(one) - len(other)) > LIKE * max(len(one), len(other)):
        return False
    head = min(len(one), len(other), 8)
    return np.array_equal(one[:head], other[:head])


class Run(Struct, frozen=True):
    """``length`` operators from ``start`` of a sequence, found at ``place`` in the forward pass.

    ``last``: the recompute ends with this run. The run after it belongs to another recompute.
    """

    start: int
    place: int
    length: int
    last: bool

    @property
    def stop(self) -> int:
        """The place behind the last operator."""
        return self.place + self.length


class ForwardSequence:
    """The operators of the forward pass, indexed for searching."""

    def __init__(self, codes: Int64) -> None:
        self.codes = codes
        self._places = self.codes.argsort(kind="stable")
        self._sorted = self.codes[self._places]

    def __len__(self) -> int:
        return len(self.codes)

    def cut(
        self,
        wanted: Int64,
        end: int,
        low: int,
        high: int,
        expected: int,
        behind: Iterable[Run] = (),
    ) -> list[Run]:
        """``wanted[:end]`` as runs of this sequence within [low, high), the last run first.

        Each run is the longest that ends where the next one begins. Among runs of equal length the
        nearest to its expected place is taken. Operators that fit nowhere are passed over.

        Args:
            wanted: Codes of the sequence.
            end: Behind the last operator to cut.
            low: First place allowed.
            high: Place behind the last allowed.
            expected: Where the last operator is expected.
            behind: Runs already cut from the same sequence; the result begins with them.
        """
        runs = list(behind)
        while end:
            best = self._best(wanted, end, low, high, expected, runs)
            if best is None:
                end -= 1
                continue
            if best.last and runs:
                runs[-1:] = self._shared_out(wanted, best, runs[-1], runs[0].stop)
            else:
                runs.append(best)
            end = best.start
        return runs

    def in_order(self, wanted: Int64, walks: list[Walk]) -> list[Walk]:
        """The walks from the outermost checkpoint's to the innermost's, if operators fit so too."""
        if len(walks) < 2:
            return walks
        at = np.concatenate([walk.at for walk in walks])
        ordered = sorted((walk.places for walk in walks), key=lambda places: int(places[0]))
        if not np.array_equal(wanted[at], self.codes[np.concatenate(ordered)]):
            return walks
        ends = np.cumsum([len(places) for places in ordered])
        return [Walk(*both) for both in zip(np.split(at, ends[:-1]), ordered, strict=True)]

    def _shared_out(self, wanted: Int64, run: Run, after: Run, stop: int) -> list[Run]:
        """Two recomputes, the later first. Operators that fit both go to the end of the earlier.

        The node that asked for both wants both to end at ``stop``.
        """
        room = min(after.length - 1, stop - run.stop)
        if run.start + run.length != after.start or room <= 0:
            return [after, run]
        fits = wanted[after.start : after.start + room] == self.codes[run.stop : run.stop + room]
        more = room if fits.all() else int(np.flatnonzero(~fits)[0])
        later = replace(
            after, start=after.start + more, place=after.place + more, length=after.length - more
        )
        return [later, replace(run, length=run.length + more)]

    def _best(
        self, wanted: Int64, end: int, low: int, high: int, expected: int, runs: list[Run]
    ) -> Run | None:
        after = runs[-1] if runs else None
        on = expected if after is None else after.place - 1
        # All recomputes of one sequence were asked for by one node, and end near it.
        again = expected if after is None else runs[0].stop - 1
        best: tuple[int, Run] | None = None
        for position in self._nearest(int(wanted[end - 1]), low, high, on):
            length = self._length(wanted, end, position, low)
            if not length:
                continue
            last = after is None or position >= after.place
            jumps = last and after is not None
            gap = abs(position - (again if last else on))
            if length < SHORT_RUN and (gap > NEAR or (jumps and length < end)):
                continue
            # A recompute ends at the operator that asked for it, or a few operators later that
            # save nothing, and may leave some out, such as a cast that autocast cached: each
            # operator of the distance costs as much as one that fits gains.
            score = length - gap
            if best is None or score > best[0]:
                best = (score, Run(end - length, position - length + 1, length, last))
            if length == end and not jumps:
                break  # explains the whole rest, and no nearer place does
        return None if best is None else best[1]

    def _nearest(self, code: int, low: int, high: int, place: int) -> Iterator[int]:
        """Places within [low, high) of operators with that code, nearest to ``place`` first."""
        if low <= place < high and self.codes[place] == code:
            yield place
        left, right = self._sorted.searchsorted(code), self._sorted.searchsorted(code, "right")
        places = self._places[left:right]
        places = places[slice(*places.searchsorted((low, high)))]
        nearest: list[int] = places[np.abs(places - place).argsort(kind="stable")].tolist()
        yield from nearest[bool(nearest and nearest[0] == place) :]

    def _length(self, wanted: Int64, end: int, position: int, low: int) -> int:
        longest = min(end, position - low + 1)
        differ = wanted[end - longest : end] != self.codes[position - longest + 1 : position + 1]
        breaks = np.flatnonzero(differ)
        return longest - 1 - int(breaks[-1]) if len(breaks) else longest


def until_jump(runs: list[Run]) -> list[Run]:
    """The runs of one recompute, the last of a sequence. Latest first, as cut."""
    return list(itertools.takewhile(lambda run: run is runs[0] or not run.last, runs))


class Walk(Struct, frozen=True):
    """One recompute: positions in the sequence, and the same operators' places in the forward."""

    at: Int64
    places: Int64


def walks_of(runs: list[Run]) -> list[Walk]:
    """Runs (latest first) grouped into single walks through the forward, in order of time."""
    groups: list[list[Run]] = []
    for run in runs:
        if run.last:
            groups.append([])
        groups[-1].append(run)
    return [
        Walk(
            np.concatenate([np.arange(run.start, run.start + run.length) for run in group[::-1]]),
            np.concatenate([np.arange(run.place, run.stop) for run in group[::-1]]),
        )
        for group in groups[::-1]
    ]
