"""Cutting one sequence of operators into runs that stand just so in another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recompute_scan.trace.columns import Int64

# A run this short proves something only where it is expected to stand.
SHORT_RUN = 3
# How far, in operators, from its expected end a short run may stand.
NEAR = 8
# Going back within one stretch starts a second replay; it must explain more than it assumes.
_JUMP = 2.0
_PER_GAP = 0.01


@dataclass(frozen=True)
class Run:
    """``length`` operators from ``start`` of a stretch, found at ``place`` in the forward pass."""

    start: int
    place: int
    length: int

    @property
    def stop(self) -> int:
        """The place behind the last operator."""
        return self.place + self.length


class ForwardSequence:
    """The operators of the forward pass as codes, indexed for searching.

    Args:
        codes: One number per operator; equal for equal name, shapes and types.
    """

    def __init__(self, codes: Int64) -> None:
        self.codes = codes
        self._places = np.argsort(codes, kind="stable")
        self._sorted = codes[self._places]

    def __len__(self) -> int:
        return len(self.codes)

    def cut(self, wanted: Int64, end: int, low: int, high: int, expected: int) -> list[Run]:
        """``wanted[:end]`` as runs of this sequence within [low, high), the last run first.

        Each run is the longest that ends where the one before it began; of equally long ones
        that nearest to where it is expected. What fits nowhere is passed over.

        Args:
            wanted: Codes of the stretch.
            end: How many of them to cut.
            low: First place allowed.
            high: Place behind the last allowed.
            expected: Where the last operator is expected.
        """
        runs: list[Run] = []
        cursor: int | None = None
        while end > 0:
            best = self._best(wanted, end, low, high, expected, cursor)
            if best is None:
                end -= 1
                continue
            position, length = best
            runs.append(Run(end - length, position - length + 1, length))
            end -= length
            cursor = position - length + 1
            expected = cursor - 1
        return runs

    def _best(
        self, wanted: Int64, end: int, low: int, high: int, expected: int, cursor: int | None
    ) -> tuple[int, int] | None:
        code = wanted[end - 1]
        left = np.searchsorted(self._sorted, code)
        right = np.searchsorted(self._sorted, code, side="right")
        places = self._places[left:right]
        places = places[slice(*np.searchsorted(places, (low, high)))]
        best: tuple[float, int, int] | None = None
        for position in places[np.argsort(np.abs(places - expected), kind="stable")]:
            length = self._length(wanted, end, int(position), low)
            gap = abs(int(position) - expected)
            jumps = cursor is not None and position >= cursor
            if length < SHORT_RUN and (gap > NEAR or (jumps and length < end)):
                continue
            score = length - _PER_GAP * gap - (_JUMP if jumps else 0.0)
            if cursor is None and position > expected:
                # A replay ends at the operator that asked for it, but for a few behind it that
                # save nothing: going beyond costs as much as it explains.
                score -= gap
            if best is None or score > best[0]:
                best = (score, int(position), length)
            if length == end and not jumps:
                break  # explains all that is left, and no nearer place does
        return None if best is None else best[1:]

    def _length(self, wanted: Int64, end: int, position: int, low: int) -> int:
        longest = min(end, position - low + 1)
        ours = wanted[end - longest : end][::-1]
        theirs = self.codes[position - longest + 1 : position + 1][::-1]
        differ = np.flatnonzero(ours != theirs)
        return int(differ[0]) if len(differ) else longest


def until_jump(runs: list[Run]) -> list[Run]:
    """The runs up to the first that goes back: those of one replay. Latest first, as cut."""
    kept: list[Run] = []
    for run in runs:
        if kept and run.stop > kept[-1].place:
            break
        kept.append(run)
    return kept


def passes_of(runs: list[Run]) -> list[list[Run]]:
    """Runs (latest first) grouped into single walks through the forward, in order of time."""
    passes: list[list[Run]] = []
    for run in runs:
        if passes and run.stop <= passes[-1][-1].place:
            passes[-1].append(run)
        else:
            passes.append([run])
    return [walk[::-1] for walk in passes[::-1]]
