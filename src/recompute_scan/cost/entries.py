"""What a checkpoint does before and behind a run of the operators that it checkpoints.

It shows as time between operators: preparing, keeping inputs and the state of random numbers. Where
``recompute-scan run`` recorded, marks say which of that time is the checkpointed function's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from recompute_scan.annotations import REGION
from recompute_scan.cost.edits import Edit
from recompute_scan.cost.moments import Moments
from recompute_scan.recompute.facts import Recompute
from recompute_scan.recompute.structure import Role
from recompute_scan.result import Checkpoint
from recompute_scan.trace.columns import Bool, Int64


class Entries:
    """The time that goes with a checkpoint beside its operators.

    Args:
        facts: What ran again.
        done: The calls behind which time between operators can begin.
        operators: The operators.
    """

    def __init__(self, facts: Recompute, done: Bool, operators: Bool) -> None:
        calls = facts.calls
        self._facts = facts
        self._done = Moments(calls.thread, ((done, calls.end),))
        self._operators = Moments(calls.thread, ((operators, calls.start),))
        self._gap = typical_gap(facts, facts.alignment.forward)

    def gone(
        self, checkpoints: Sequence[Checkpoint], kept: Checkpoint | None, rows: Int64
    ) -> Iterator[Edit]:
        """What all these checkpoints but one do before and behind a run of the operators.

        Args:
            checkpoints: Those round the operators, outermost first.
            kept: The one that stays, if any does.
            rows: The operators, in order.
        """
        calls = self._facts.calls
        if any(c.variant == "reentrant" for c in checkpoints if c is not kept):
            yield from self._function(rows)
        marks = self.marks_round(int(rows[0]))
        thread, first = int(calls.thread[rows[0]]), int(calls.start[rows[0]])
        for checkpoint, mark in zip(reversed(checkpoints), marks, strict=False):
            start = int(calls.start[mark])
            if checkpoint is kept or self._operators.next(thread, start, otherwise=-1)[0] != first:
                continue
            parent = int(calls.parent[mark])
            begin, _ = self._done.last(thread, start, otherwise=start)
            if parent >= 0 and self._facts.structure.role[parent] == Role.RANGE:
                begin = max(begin, int(calls.start[parent]))
            yield Edit(thread, begin, start, gone=True, add=self._gap)

    def marks_round(self, row: int) -> list[int]:
        """Rows of the calls that begin the checkpointed regions round an operator, inside first.

        A region's range, or the checkpoint function that it stands in.
        """
        calls, structure = self._facts.calls, self._facts.structure
        found = []
        above = int(calls.parent[row])
        while above >= 0 and structure.role[above] == Role.RANGE:
            if calls.names[calls.name[above]].startswith(REGION):
                parent = int(calls.parent[above])
                function = parent >= 0 and parent == structure.function[above]
                found.append(parent if function else above)
            above = int(calls.parent[above])
        return found

    def _function(self, rows: Int64) -> Iterator[Edit]:
        """What a checkpoint function does before and behind its operators, which goes with it.

        Where a mark says what of it is the function that it runs, that stays.
        """
        calls = self._facts.calls
        function = int(self._facts.structure.function[rows[0]])
        if function < 0 or self._facts.structure.function[rows[-1]] != function:
            return
        thread = int(calls.thread[function])
        first, last = int(calls.start[function]), int(calls.end[function])
        begin, end, gap = int(calls.start[rows[0]]), int(calls.end[rows[-1]]), self._gap
        if self._operators.next(thread, first, otherwise=-1)[0] != begin:
            first = -1
        inside = self._below(int(rows[0]), function)
        if inside is not None and calls.end[inside] >= end:
            begin, end, gap = int(calls.start[inside]), int(calls.end[inside]), 0.0
        if first >= 0:
            yield Edit(thread, first, begin, gone=True, add=gap)
        if self._operators.next(thread, end, otherwise=last)[0] >= last:
            yield Edit(thread, end, last, gone=True)

    def _below(self, row: int, function: int) -> int | None:
        """Row of the range right inside a checkpoint function that an operator stands in."""
        calls, role = self._facts.calls, self._facts.structure.role
        above = int(calls.parent[row])
        while above > function and calls.parent[above] != function:
            above = int(calls.parent[above])
        return above if above > function and role[above] == Role.RANGE else None


def typical_gap(facts: Recompute, rows: Int64) -> float:
    """The usual time from one of these calls to the next on its thread, ns."""
    calls = facts.calls
    if len(rows) < 2:
        return 0.0
    between = calls.start[rows[1:]] - calls.end[rows[:-1]]
    between = between[(calls.thread[rows[1:]] == calls.thread[rows[:-1]]) & (between >= 0)]
    return float(np.median(between)) if len(between) else 0.0
