"""What a run without gradients becomes where it will have them: its first run with them shows it.

Most operators do the same either way, and autograd's record comes on top. Their own times differ
less for that than for caches and memory between one place and another, so a typical time is added
for what they save. Some operators take another way: with gradients, a recurrent layer copies what
its own steps would overwrite, and an encoder layer is not one fused call. Those take the time of
their run with gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from recompute_scan.cost.clock import TimeEdit
from recompute_scan.cost.hooks import Hooks
from recompute_scan.cost.phases import Float64
from recompute_scan.cost.reruns import OpSequence, with_gradients
from recompute_scan.cost.saved import saved_before, saved_by
from recompute_scan.model import Calls
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.recompute.vocabulary import COMPILED_CALL, NEUTRAL
from recompute_scan.trace.columns import Int32, Int64, Kind

# How long each of these calls takes, ns, without the profiler.
Lengths = Callable[[Int64], Float64]
# An edit that depends on what hooks take, and calls.
HookedEdit = Callable[[Hooks, Lengths], TimeEdit]


class Recording(Struct, frozen=True):
    """A run of operators as autograd records it.

    Attributes:
        like: For each operator, the row of a run with gradients; its own where there is none.
        saved: How many tensors are saved.
        measured: How many of them by operators whose time with gradients is known: they had them
            in this run, or take another way.
        others: Rows of those that take another way, as they are.
        instead: The same with gradients.
    """

    like: Int64
    saved: int
    measured: int
    others: Int64
    instead: Int64

    def more(self, hooks: Hooks, lengths: Lengths) -> float:
        """How much longer it takes than the run as it is, ns; 0 where that had gradients."""
        way = float(lengths(self.instead).sum() - lengths(self.others).sum())
        return way + hooks.gradient_ns * (self.saved - self.measured)


class Recordings:
    """The runs with gradients in a trace.

    Args:
        facts: What ran again.
        sequences: The recomputes that matter.
    """

    def __init__(self, facts: RecomputeFacts, sequences: Sequence[OpSequence]) -> None:
        calls = facts.calls
        self._facts = facts
        self._saves = saved_by(calls, facts.structure.role)
        self._saved = _with_all_inside(calls, self._saves)
        neutral = calls.matching(NEUTRAL)[calls.name]
        self._counts = (calls.kind == Kind.OP) & ~neutral
        # A number for what each operator consists of.
        of_name = np.array([crc32(name.encode()) for name in calls.names], np.int64)
        self._way = _with_all_inside(calls, np.where(self._counts, of_name[calls.name], 0))
        # For each operator of the forward pass: the row of its first run again with gradients.
        self._run: Int32 = np.full(len(facts.calls), -1, np.int32)
        for sequence in reversed(sequences):
            recompute = facts.alignment.recomputes[sequence.recompute]
            again = recompute.again[sequence.first : sequence.stop]
            if with_gradients(facts, again):
                self._run[recompute.original[sequence.first : sequence.stop]] = again

    def of(self, rows: Int64, originals: Int64) -> Recording:
        """A run with gradients, whether or not it had them.

        Args:
            rows: Its operators.
            originals: Their first run, which may be this one.
        """
        if with_gradients(self._facts, rows):
            number = int(self._saved[rows].sum())
            return Recording(rows, number, number, rows[:0], rows[:0])
        run = self._run[originals].astype(np.int64)
        like = np.where(run >= 0, run, rows)
        another = self._way[rows] != self._way[like]
        saved = self._saved[like]
        measured = int(saved[another].sum())
        return Recording(like, int(saved.sum()), measured, rows[another], like[another])

    def stop(self, rows: Int64, recording: Recording) -> int | None:
        """When early stop ends a run of these operators, ns; ``None`` where none saves a tensor.

        A non-reentrant recompute ends at the last tensor that its first run saved
        (``torch/utils/checkpoint.py``, ``_StopRecomputationError``): in front of an operator of
        which only inputs are saved, else behind it. A compiled graph runs as a whole, and so does
        here what takes another way with gradients.
        """
        calls, saving = self._facts.calls, np.flatnonzero(self._saved[recording.like] > 0)
        if not len(saving):
            return None
        row, like = int(rows[saving[-1]]), int(recording.like[saving[-1]])
        graph = _compiled_around(calls, row)
        ours, theirs = self._operators(row), self._operators(like)
        last = np.flatnonzero(self._saves[theirs] > 0)[-1:]
        same = self._way[row] == self._way[like] and len(ours) == len(theirs)
        if graph >= 0 or not same or not len(last):
            return int(calls.end[row if graph < 0 else graph])
        inside = int(ours[last[0]])
        name = calls.names[calls.name[inside]]
        return int((calls.start if saved_before(name) else calls.end)[inside])

    def unevenness(self) -> float:
        """How differently the same operators take in one place and another, as a share.

        Between their first run and a run again that goes the same way: caches, memory to allocate,
        clocks. A prediction that takes one run out and leaves the other cannot know which of the
        two times will stay.
        """
        time, alignment = self._facts.work.time, self._facts.alignment
        same = alignment.ran & (self._way[alignment.original] == self._way[alignment.again])
        before = float(time[alignment.original[same]].sum())
        after = float(time[alignment.again[same]].sum())
        return abs(after - before) / max(after, before) if before and after else 0.0

    def _operators(self, row: int) -> Int64:
        """Rows of an operator and all in it that does something."""
        return row + np.flatnonzero(self._counts[row : row + int(self._facts.calls.size[row]) + 1])


def _compiled_around(calls: Calls, row: int) -> int:
    """Row of the compiled graph around this call, which saves tensors at its end; or -1."""
    while row >= 0 and not COMPILED_CALL.match(calls.names[calls.name[row]]):
        row = int(calls.parent[row])
    return row


def _with_all_inside(calls: Calls, values: npt.NDArray[np.integer[Any]]) -> Int64:
    """For each call the sum over it and all inside it, which overflows where it has to."""
    before = np.zeros(len(calls) + 1, np.int64)
    np.cumsum(values, out=before[1:])
    return np.asarray(before[np.arange(1, len(calls) + 1) + calls.size] - before[:-1])
