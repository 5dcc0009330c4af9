"""The run wrapper's annotations in a trace, and whether they agree with the operators."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from recompute_scan.annotations import REGION, REPLAY, RegionMark, parse_region, parse_replay
from recompute_scan.model import Calls
from recompute_scan.recompute.align import Alignment
from recompute_scan.recompute.structure import Role, Structure
from recompute_scan.trace.columns import Bool, Int32, Int64


@dataclass(frozen=True)
class MarkedCall:
    """One checkpointed call of the forward pass.

    Attributes:
        mark: What the wrapper wrote.
        row: Row of the mark.
        first: Position of its first operator in ``Alignment.forward``.
        last: Position of its last operator.
        replays: How many replays of this call were marked.
    """

    mark: RegionMark
    row: int
    first: int
    last: int
    replays: int


@dataclass(frozen=True)
class Marks:
    """All marks of a trace.

    Attributes:
        calls: Checkpointed calls of the forward pass that hold an operator, outermost first.
        forward: The rows that their positions count: ``Alignment.forward``.
        disagreeing: Replayed operators outside every marked replay, and operators inside one
            that the forward pass does not explain. 0 when both views agree.
        replayed: Replayed operators found by structure and alignment, for comparison.
    """

    calls: tuple[MarkedCall, ...]
    forward: Int64
    disagreeing: int
    replayed: int


def read_marks(calls: Calls, structure: Structure, alignment: Alignment) -> Marks | None:
    """The marks of the trace, or ``None`` where the run wrapper left none."""
    regions = calls.named(re.compile(re.escape(REGION)))
    replays = calls.named(re.compile(re.escape(REPLAY)))
    if not len(regions):
        return None
    times: dict[int, int] = {}
    for row in replays:
        call = parse_replay(calls.names[calls.name[row]])
        if call is not None:
            times[call] = times.get(call, 0) + 1
    marked = []
    for row in regions[structure.engine[regions] < 0]:
        mark = parse_region(calls.names[calls.name[row]])
        first = int(np.searchsorted(alignment.forward, row))
        last = int(np.searchsorted(alignment.forward, row + calls.size[row], side="right")) - 1
        if mark is not None and last >= first:
            marked.append(MarkedCall(mark, int(row), first, last, times.get(mark.call, 0)))
    none = alignment.forward[:0]
    matched = np.concatenate([r.again for r in alignment.replays] or [none])
    original = np.concatenate([r.original for r in alignment.replays] or [none])
    inside = _inside(calls, replays)
    # A function's mark is around what it was given to run, and not around what it does itself.
    beside = structure.function[original] > _innermost(calls, regions)[original]
    unexplained = alignment.unexplained[inside[alignment.unexplained]]
    unexplained = unexplained[structure.role[unexplained] == Role.CANDIDATE]
    unexplained = unexplained[~_prepares(structure, unexplained, np.sort(matched))]
    return Marks(
        calls=tuple(marked),
        forward=alignment.forward,
        disagreeing=int((~inside[matched] & ~beside).sum()) + len(unexplained),
        replayed=len(matched),
    )


def _prepares(structure: Structure, rows: Int64, matched: Int64) -> Bool:
    """For each row: does it stand before a checkpoint function, no replayed operator between?

    Within a reentrant checkpoint, whose first run has gradients off, some functions are called
    in the replay alone, and so is what makes their arguments (fairscale).
    """
    functions = np.flatnonzero(structure.function == np.arange(len(structure.function)))
    end = len(structure.function)
    function, replayed = (
        np.append(after, end)[np.searchsorted(after, rows)] for after in (functions, matched)
    )
    same = structure.engine[np.minimum(function, end - 1)] == structure.engine[rows]
    return np.asarray((function < replayed) & same)


def _innermost(calls: Calls, rows: Int64) -> Int32:
    """For each call: the innermost of ``rows`` that holds it, -1 for none."""
    found = np.full(len(calls), -1, np.int32)
    for row in rows.tolist():  # in order: what stands in another comes after it
        found[row + 1 : row + 1 + int(calls.size[row])] = row
    return found


def _inside(calls: Calls, rows: Int64) -> Bool:
    """For each call: does it stand inside one of ``rows``?"""
    edges = np.zeros(len(calls) + 1, np.int64)
    np.add.at(edges, rows + 1, 1)
    np.add.at(edges, rows + 1 + calls.size[rows], -1)
    return np.cumsum(edges)[: len(calls)] > 0
