"""Cutting one sequence of operators into runs that stand just so in another.

A recompute walks through the forward pass from its first operator to its last. It may leave some
out, but it crosses every boundary of a checkpointed call that the first run crossed on the way:
where the forward pass crossed one and the sequence did not, one recompute ends and another begins.
(The other way about proves nothing: within a reentrant checkpoint, code that checkpoints only
where gradients are on does so in the recompute alone.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.trace.columns import Int64, Ints

# A run this short proves something only where it is expected to stand.
SHORT_RUN = 3
# How far, in operators, from its expected end a short run may stand.
NEAR = 8
# Going back within one sequence starts a second recompute; it must explain more than it assumes.
_JUMP = 2.0
# What a recompute leaves out, such as casts that autocast has cached, are single operators.
_PER_GAP = 0.5


class Sequence(Struct, frozen=True):
    """Operators in the order in which they ran, one entry each.

    Attributes:
        codes: Equal for operators of equal name, shapes and types.
        crossed: How many boundaries of checkpointed calls lie behind the operator before.
        function: The innermost checkpoint function in which it ran, -1 for none.
    """

    codes: Int64
    crossed: Int64
    function: Ints

    def __len__(self) -> int:
        return len(self.codes)


class Run(Struct, frozen=True):
    """``length`` operators from ``start`` of a sequence, found at ``place`` in the forward pass.

    ``last`` where its recompute ends with it: the run after it, if any, belongs to another.
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

    def __init__(self, operators: Sequence) -> None:
        self.codes = operators.codes
        self._crossed = operators.crossed
        self._places = self.codes.argsort(kind="stable")
        self._sorted = self.codes[self._places]

    def __len__(self) -> int:
        return len(self.codes)

    def cut(
        self,
        wanted: Sequence,
        end: int,
        low: int,
        high: int,
        expected: int,
        begin: int = 0,
        behind: Iterable[Run] = (),
    ) -> list[Run]:
        """``wanted[begin:end]`` as runs of this sequence within [low, high), the last run first.

        Each run is the longest that ends where the one before it began; of equally long ones
        that nearest to where it is expected. What fits nowhere is passed over.

        Args:
            wanted: The sequence.
            end: Behind the last operator to cut.
            low: First place allowed.
            high: Place behind the last allowed.
            expected: Where the last operator is expected.
            begin: The first operator to cut.
            behind: Runs that have been cut from the same sequence; they are part of the answer.
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

    def _shared_out(self, wanted: Sequence, run: Run, after: Run, stop: int) -> list[Run]:
        """Two recomputes, the later first; what could be of either goes to the end of the former.

        Both end where the node that asked for them wants them to: ``stop``.
        """
        room = min(after.length - 1, stop - run.stop)
        if run.start + run.length != after.start or room <= 0:
            return [after, run]
        here, there = slice(after.start, after.start + room), slice(run.stop, run.stop + room)
        fits = wanted.codes[here] == self.codes[there]
        fits &= self._crossed[there] <= wanted.crossed[here]
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
        wanted: Sequence,
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
        for position in self._nearest(int(wanted.codes[end - 1]), low, high, on):
            length = self._length(wanted, begin, end, position, low)
            if not length:
                continue
            last = after is None or not self._goes_on(wanted, end, position, after)
            jumps = last and after is not None
            gap = abs(position - (again if last else on))
            if length < SHORT_RUN and (gap > NEAR or (jumps and length < end - begin)):
                continue
            # A recompute ends at the operator that asked for it, but for a few behind it that save
            # nothing: ending elsewhere costs as much as it explains.
            score = length - (gap if last else _PER_GAP * gap) - (_JUMP if jumps else 0.0)
            if best is None or score > best[0]:
                best = (score, Run(end - length, position - length + 1, length, last))
            if length == end - begin and not jumps:
                break  # explains all that is left, and no nearer place does
        return None if best is None else best[1]

    def _nearest(self, code: int, low: int, high: int, place: int) -> Iterator[int]:
        """Places within [low, high) of operators of that code, the nearest to ``place`` first."""
        if low <= place < high and self.codes[place] == code:
            yield place
        left, right = self._sorted.searchsorted(code), self._sorted.searchsorted(code, "right")
        places = self._places[left:right]
        places = places[slice(*places.searchsorted((low, high)))]
        nearest: list[int] = places[np.abs(places - place).argsort(kind="stable")].tolist()
        yield from nearest[bool(nearest and nearest[0] == place) :]

    def _goes_on(self, wanted: Sequence, end: int, position: int, after: Run) -> bool:
        """Can the recompute that ran the operator at ``position`` have gone on to ``after``?"""
        if position >= after.place:
            return False
        between = int(self._crossed[position + 1 : after.place + 1].sum())
        return between <= int(wanted.crossed[end : after.start + 1].sum())

    def _length(self, wanted: Sequence, begin: int, end: int, position: int, low: int) -> int:
        longest = min(end - begin, position - low + 1)
        first, place = end - longest, position - longest + 1
        differ = wanted.codes[first:end] != self.codes[place : position + 1]
        crosses = self._crossed[place + 1 : position + 1] > wanted.crossed[first + 1 : end]
        differ[:-1] |= crosses
        breaks = np.flatnonzero(differ)
        if not len(breaks):
            return longest
        last = int(breaks[-1])
        length = longest - 1 - last
        function = wanted.function[first + last : end]
        if crosses[last : last + 1].any() and function[0] == function[1] >= 0:
            # A function that the sequence entered is run from its begin: not from here.
            others = np.flatnonzero(function != function[0])
            return len(others) and len(function) - int(others[0])
        return length


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
