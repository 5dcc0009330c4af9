"""Where in the forward pass a stretch of replayed operators is expected: by autograd's numbers.

A node carries the sequence number that autograd gave out when the operator of the forward pass
ran, so it leads from a place in the backward pass to one in the forward pass. Inside a
reentrant replay the numbers are those of the replayed operators, which lead on to theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recompute_scan.model import Calls
from recompute_scan.recompute.structure import Role, Structure, enclosing_engines, root_engines
from recompute_scan.trace.columns import Int64, Ints


@dataclass(frozen=True)
class Anchor:
    """Where a stretch is expected: places in the forward sequence.

    ``first`` and ``last`` bound the checkpointed call; ``first`` is -1 where only the expected
    end is known.
    """

    first: int
    last: int


class Anchors:
    """Finds the anchor of an engine range, and knows what has been matched so far.

    Attributes:
        backwards: For each forward operator: how many backward passes went through it.
    """

    def __init__(self, calls: Calls, structure: Structure, forward: Int64) -> None:
        self._calls = calls
        self._structure = structure
        self._forward = forward
        self._origin = np.full(len(calls), -1, np.int32)
        self._origin[forward] = forward
        numbered = structure.number >= 0
        functions = (structure.role == Role.RANGE) & numbered & (structure.function >= 0)
        functions &= structure.function == np.arange(len(calls))
        outside = structure.engine < 0
        rows = np.flatnonzero(numbered & outside & ((structure.role == Role.FORWARD) | functions))
        self._outer_rows = rows[np.argsort(structure.number[rows], kind="stable")]
        self._outer_numbers = structure.number[self._outer_rows]
        self.backwards = self._count_backwards(structure.rows(Role.BACKWARD))

    def remember(self, again: Int64, original: Int64) -> None:
        """Keep which forward operator each replayed one repeats, for stretches inside it."""
        self._origin[again] = original

    def find(self, engine: int) -> Anchor | None:
        """Where the replays of an engine range are expected to end, and to begin if known."""
        calls, structure = self._calls, self._structure
        number = int(structure.number[engine])
        if number < 0:
            return None
        enclosing = int(enclosing_engines(calls, structure, np.array([engine]))[0])
        if enclosing >= 0:
            first, last = enclosing + 1, enclosing + 1 + int(calls.size[enclosing])
            rows = np.arange(first, last)
            inside = rows[
                (structure.engine[rows] == enclosing)
                & (structure.number[rows] >= 0)
                & (structure.number[rows] <= number)
                & np.isin(structure.role[rows], (Role.CANDIDATE, Role.RANGE))
                & (calls.start[rows] < calls.start[engine])
            ]
            # The nodes of a nested backward belong to the replay that started it, no other.
            if not len(inside):
                return None
            return self._place(int(inside[np.argmax(structure.number[inside])]), engine)
        at = int(np.searchsorted(self._outer_numbers, number, side="right")) - 1
        return self._place(int(self._outer_rows[at]), engine) if at >= 0 else None

    def _place(self, row: int, engine: int) -> Anchor | None:
        """Where the forward run of ``row`` stands: an operator, or a checkpoint function."""
        if self._structure.function[row] == row:
            inside = np.arange(row + 1, row + 1 + int(self._calls.size[row]))
            origins = self._origin[inside]
            origins = origins[origins >= 0]
            if not len(origins):
                return None
            places = np.searchsorted(self._forward, origins)
            whole = bool(self._structure.checkpoint_node[engine])
            return Anchor(int(places.min()) if whole else -1, int(places.max()))
        origin = int(self._origin[row])
        return None if origin < 0 else Anchor(-1, int(np.searchsorted(self._forward, origin)))

    def _count_backwards(self, engines: Int64) -> Int64:
        """For each forward operator: how often a node of its own, or of its checkpoint, ran."""
        calls, structure = self._calls, self._structure
        times = np.zeros(len(calls), np.int32)
        root = root_engines(calls, structure)
        root = root[structure.number[root] >= 0]
        if len(self._outer_rows) and len(root):
            numbers, counts = np.unique(structure.number[root], return_counts=True)
            if len(np.unique(calls.thread[self._outer_rows])) > 1:
                counts = np.minimum(counts, 1)  # numbers of several threads repeat each other
            at = np.searchsorted(self._outer_numbers, numbers, side="right") - 1
            np.maximum.at(times, self._outer_rows[at[at >= 0]], counts[at >= 0])
        elif len(engines):
            # No sequence numbers in this trace: all that ran before a backward has one.
            before = calls.start[self._forward] < calls.start[engines].max()
            return np.asarray(before, np.int64)
        outermost = self._outermost_function(structure.function[self._forward])
        whole = times[np.maximum(outermost, 0)]
        return np.where(outermost >= 0, whole, times[self._forward])

    def _outermost_function(self, function: Ints) -> Ints:
        outermost: Ints = function.copy()
        for _ in range(64):
            parents = np.where(outermost >= 0, self._calls.parent[outermost], -1)
            above = np.where(parents >= 0, self._structure.function[parents], -1)
            if not (above >= 0).any():
                break
            outermost = np.where(above >= 0, above, outermost)
        return outermost
