"""Operators of the backward pass matched with operators of the forward pass.

A node's operators are one sequence. The sequence is cut from its end into runs: operators in a row
that the forward pass has in the same row. A recompute goes through the forward pass from its first
operator to its last and may leave some out. Where the places stop rising, one recompute ends and
another begins.

Where layers are equal, a sequence can be one recompute of two layers or two recomputes of one.
Three facts decide, once every sequence has been read:

* sequences of the same operators come from checkpoints of the same kind. The first layer's can be
  read in one way only, and the others are read like it. So is a sequence that ends like it, where a
  checkpoint around all layers put its recompute before;
* checkpoints around one operator are recomputed from the outermost to the innermost, so no
  recompute in a sequence begins before the one that ran before it;
* checkpointed calls nest or are disjoint, so recomputes that overlap in part cannot both be right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.trace.columns import Int64

# A shorter run is evidence only near the place where it is expected.
SHORT_RUN = 3
# How far from that place, in operators, a short run may end.
NEAR = 8
# Cost of each operator that a recompute leaves out, such as a cast that autocast cached.
_PER_GAP = 0.5


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
        begin: int = 0,
        behind: Iterable[Run] = (),
    ) -> list[Run]:
        """``wanted[begin:end]`` as runs of this sequence within [low, high), the last run first.

        Each run is the longest that ends where the next one begins. Among runs of equal length the
        nearest to its expected place is taken. Operators that fit nowhere are passed over.

        Args:
            wanted: Codes of the sequence.
            end: Behind the last operator to cut.
            low: First place allowed.
            high: Place behind the last allowed.
            expected: Where the last operator is expected.
            begin: The first operator to cut.
            behind: Runs already cut from the same sequence; the result begins with them.
        """
        runs = list(behind)
        while end > begin:
            best = self._best(wanted, begin, end, low, high, expected, runs)
            if best is None:
                end -= 1
                continue
            if best.last and runs:
                runs[-1:] = self._shared_out(wanted, best, runs[-1], runs[0].stop)
            else:
                runs.append(best)
            end = best.start
        return runs

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
            after,
            start=after.start + more,
            place=after.place + more,
            length=after.length - more,
        )
        return [later, replace(run, length=run.length + more)]

    def _best(
        self,
        wanted: Int64,
        begin: int,
        end: int,
        low: int,
        high: int,
        expected: int,
        runs: list[Run],
    ) -> Run | None:
        after = runs[-1] if runs else None
        on = expected if after is None else after.place - 1
        # All recomputes of one sequence were asked for by one node, and end near it.
        again = expected if after is None else runs[0].stop - 1
        best: tuple[float, Run] | None = None
        for position in self._nearest(int(wanted[end - 1]), low, high, on):
            length = self._length(wanted, begin, end, position, low)
            if not length:
                continue
            last = after is None or position >= after.place
            jumps = last and after is not None
            gap = abs(position - (again if last else on))
            if length < SHORT_RUN and (gap > NEAR or (jumps and length < end - begin)):
                continue
            # A recompute ends at the operator that asked for it, or a few operators later that
            # save nothing: each operator of the distance costs as much as one that fits gains.
            score = length - (gap if last else _PER_GAP * gap)
            if best is None or score > best[0]:
                best = (score, Run(end - length, position - length + 1, length, last))
            if length == end - begin and not jumps:
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

    def _length(self, wanted: Int64, begin: int, end: int, position: int, low: int) -> int:
        longest = min(end - begin, position - low + 1)
        differ = wanted[end - longest : end] != self.codes[position - longest + 1 : position + 1]
        breaks = np.flatnonzero(differ)
        return longest - 1 - int(breaks[-1]) if len(breaks) else longest


def until_jump(runs: list[Run]) -> list[Run]:
    """The runs of one recompute, the last of a sequence. Latest first, as cut."""
    return passes_of(runs)[-1][::-1] if runs else []


def passes_of(runs: list[Run]) -> list[list[Run]]:
    """Runs (latest first) grouped into single walks through the forward, in order of time."""
    passes: list[list[Run]] = []
    for run in runs:
        if run.last:
            passes.append([run])
        else:
            passes[-1].append(run)
    return [walk[::-1] for walk in passes[::-1]]


class Ending(Struct, frozen=True):
    """How far below its expected end a sequence may reach with its last ``count`` operators.

    ``longer``: so may any that ends with these operators.
    """

    count: int
    height: int
    longer: bool = False


class Endings(Struct, frozen=True):
    """Endings that are known, by the sequence (the bytes of its codes)."""

    known: dict[bytes, Ending]

    def of(self, operators: Int64) -> Ending | None:
        """The ending of this sequence, or of the longest known one that it ends with."""
        text = operators.tobytes() if self.known else b""
        if text in self.known:
            return self.known[text]
        ends = [end for end, known in self.known.items() if known.longer and text.endswith(end)]
        return self.known[max(ends, key=len)] if ends else None


class Reading(Struct, frozen=True):
    """How one sequence was read.

    Attributes:
        operators: Codes of its operators.
        expected: Place in the forward pass where its recomputes are expected to end.
        recomputes: First and last place of each, in order of time.
        asked: A node asked for a saved tensor; else a checkpoint function's node ran it.
    """

    operators: Int64
    expected: int
    recomputes: tuple[tuple[int, int], ...]
    asked: bool

    @property
    def key(self) -> bytes:
        """Equal for equal operators."""
        return self.operators.tobytes()

    @property
    def whole(self) -> Ending:
        """The ending that lets all of such a sequence reach as far down as this one."""
        return Ending(len(self.operators), self.expected - min(self.begins))

    @property
    def begins(self) -> list[int]:
        """First place of each recompute, in order of time."""
        return [first for first, _ in self.recomputes]

    @property
    def in_order(self) -> bool:
        """Does every recompute begin at or behind the beginning of the one before?"""
        return self.begins == sorted(self.begins)


def correct(endings: Endings, readings: list[Reading]) -> Endings:
    """Further endings, found by comparing all readings.

    Only the first fact that some reading violates counts: mending it can mend the others.
    """
    for find in (_by_likeness, _by_order, _by_crossings):
        found = find(readings)
        if find is _by_likeness:
            found |= {k: e for k, e in _by_longer(readings).items() if k not in endings.known}
        new = {key: ending for key, ending in found.items() if endings.known.get(key) != ending}
        if new:
            return Endings(endings.known | new)
    return endings


def _surest(readings: Iterable[Reading]) -> dict[bytes, Reading]:
    """For each kind of sequence the reading with most recomputes."""
    surest: dict[bytes, Reading] = {}
    for reading in readings:
        known = surest.get(reading.key)
        if reading.in_order and (known is None or len(reading.recomputes) > len(known.recomputes)):
            surest[reading.key] = reading
    return surest


def _by_likeness(readings: list[Reading]) -> dict[bytes, Ending]:
    surest = _surest(readings)
    return {
        reading.key: surest[reading.key].whole
        for reading in readings
        if reading.key in surest and len(reading.recomputes) < len(surest[reading.key].recomputes)
    }


def _by_longer(readings: list[Reading]) -> dict[bytes, Ending]:
    keys = {reading.key for reading in readings}
    return {
        key: replace(reading.whole, longer=True)
        for key, reading in _surest(readings).items()
        if len(reading.recomputes) > 1
        and any(len(other) > len(key) and other.endswith(key) for other in keys)
    }


def _by_order(readings: Iterable[Reading]) -> dict[bytes, Ending]:
    endings = {}
    for reading in readings:
        count = 0
        for at in reversed(range(1, len(reading.recomputes))):
            first, last = reading.recomputes[at]
            floor = max(reading.begins[:at])
            if first < floor:
                count += last - floor + 1
                endings[reading.key] = Ending(count, reading.expected - floor)
                break
            count += last - first + 1
    return endings


def _by_crossings(readings: Iterable[Reading]) -> dict[bytes, Ending]:
    spans = [(first, last, reading) for reading in readings for first, last in reading.recomputes]
    endings: dict[bytes, Ending] = {}
    open_ends: list[int] = []
    for first, last, reading in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] < first:
            open_ends.pop()
        # A few operators fit the end of one recompute and the beginning of the next.
        if reading.asked and open_ends and open_ends[-1] + SHORT_RUN < last:
            height = reading.expected - open_ends[-1] - 1
            endings[reading.key] = Ending(len(reading.operators), height)
        open_ends.append(last)
    return {key: ending for key, ending in endings.items() if ending.height >= 0}
