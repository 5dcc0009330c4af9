"""What becomes of the host's time when a checkpoint is taken out.

Run number k again of a block's operators is asked for by its k-th checkpoint, counted from
outside, where each of them asks for one: so the run of the one that goes is the one that goes.
With it goes the checkpoint's own work, which shows as time between operators:

* from whatever came before the recompute to its first operator (unpacking, restoring the state of
  random numbers);
* after a reentrant recompute, up to the nested backward pass, and behind that;
* in the forward pass, what lies between the beginning of a checkpoint function and its first
  operator, and behind the last.

What stays changes too. A run without gradients becomes one with them where no reentrant
checkpoint is left around it (:mod:`recompute_scan.cost.gradients`), a non-reentrant checkpoint
keeps a hook at every tensor that autograd saves (:mod:`recompute_scan.cost.hooks`), and its
recompute, if a reentrant one inside made it run to its end, stops at the last of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from recompute_scan.cost.clock import TimeEdit
from recompute_scan.cost.context import Context
from recompute_scan.cost.early_stop import stopped
from recompute_scan.cost.gradients import HookedEdit, Lengths, Recording
from recompute_scan.cost.hooks import Hooks
from recompute_scan.cost.reruns import Keep, OpSequence, with_gradients
from recompute_scan.recompute.roles import Role
from recompute_scan.result import Checkpoint
from recompute_scan.trace.columns import Int64


class Removal:
    """The edits that leave one checkpoint around each block, or none.

    Args:
        around: What ran again, in the steps that matter; others have no edits.
        keep: Of the checkpoints around a block, the one that stays; where that is ``None`` every
            checkpoint goes. Where the checkpoints are not known the last run stays.
    """

    def __init__(self, around: Context, keep: Keep | None) -> None:
        self._around = around
        self._facts = around.facts
        self._keep = keep
        self._staying = np.zeros(len(around.facts.calls) + 1, np.int32)
        # How many nodes ran before each call.
        self._backwards = np.zeros(len(around.facts.calls) + 1, np.int32)
        np.cumsum(self._facts.structure.role == Role.BACKWARD, out=self._backwards[1:])
        self._ends = np.array([step.end for step in self._facts.steps], np.int64)
        # Many blocks have the same checkpoints.
        self._kept_of: dict[Sequence[Checkpoint], Checkpoint | None] = {}

    def edits(
        self, hooks: Hooks, lengths: Lengths, *, early_stop: bool | None = None
    ) -> list[TimeEdit]:
        """The edits.

        Args:
            hooks: What autograd and a non-reentrant checkpoint take for what they save.
            lengths: How long calls take.
            early_stop: Whether recomputes stop early that nothing keeps from it; ``None``: unless
                the trace shows that they do not.
        """
        if early_stop is None:
            early_stop = self._around.early_stop is not False
        edits = [*self._edits, *(self._stops if early_stop else ())]
        return [edit(hooks, lengths) if callable(edit) else edit for edit in edits]

    @property
    def stops_unseen(self) -> bool:
        """Do recomputes stop early in this that are not seen to, and not known to?"""
        return self._around.early_stop is None and bool(self._stops)

    @cached_property
    def _edits(self) -> list[TimeEdit | HookedEdit]:
        return list(self._find())

    def _find(self) -> Iterator[TimeEdit | HookedEdit]:
        sequences = self._around.sequences
        goes = [self._goes(sequence) for sequence in sequences]
        staying = self._around.recomputed & self._around.here
        for sequence, going in zip(sequences, goes, strict=True):
            if going:
                staying[self._rows(sequence)] = False
        np.cumsum(staying, out=self._staying[1:])
        changed: set[int] = set()
        for sequence, reach, going in zip(sequences, self._around.reaches, goes, strict=True):
            if not self._is_here(sequence):
                continue
            if not going:
                if sequence.runs > 1:
                    yield from self._changed_recompute(sequence)
                continue
            yield from self._gone(sequence, reach)
            yield from self._end_of_node(sequence)
            first = int(self._originals(sequence)[0])
            if first not in changed:
                changed.add(first)
                yield from self._changed_forward(sequence)
        yield from self._of_functions(goes)
        yield from self._unpacking()

    @cached_property
    def _stops(self) -> list[HookedEdit]:
        """What early stop leaves out in recomputes that stay."""
        around = self._around
        return [
            edit
            for sequence in around.sequences
            if sequence.runs > 1 and self._is_here(sequence) and not self._goes(sequence)
            if (edit := stopped(around.facts, around.recordings, sequence, self._kept(sequence)))
        ]

    def _is_here(self, sequence: OpSequence) -> bool:
        rows, first, here = self._rows(sequence), self._originals(sequence), self._around.here
        # One after the other: four numbers are no array's work.
        return bool(here[rows[0]] or here[rows[-1]] or here[first[0]] or here[first[-1]])

    # -- what goes ---------------------------------------------------------------------------

    def _goes(self, sequence: OpSequence) -> bool:
        if self._keep is None:
            return True
        if sequence.runs < 2:
            return False
        kept = self._kept(sequence)
        if kept is not None and sequence.runs == len(sequence.checkpoints):
            return sequence.run != sequence.checkpoints.index(kept)
        return sequence.run < sequence.runs - 1

    def _kept(self, sequence: OpSequence) -> Checkpoint | None:
        if self._keep is None or not sequence.checkpoints:
            return None
        if sequence.checkpoints not in self._kept_of:
            self._kept_of[sequence.checkpoints] = self._keep(sequence.checkpoints)
        return self._kept_of[sequence.checkpoints]

    def _gone(self, sequence: OpSequence, reach: tuple[int, int]) -> Iterator[TimeEdit]:
        calls = self._facts.calls
        again = self._facts.alignment.recomputes[sequence.recompute].again
        rows = self._rows(sequence)
        thread = int(calls.thread[rows[0]])
        outer = self._range_of(rows)
        add = 0.0
        start, end = int(calls.start[rows[0]]), int(calls.end[rows[-1]])
        first, stop = reach
        if first == stop:
            return
        if first == 0:
            begin = int(min(calls.start[again[0]], calls.start[outer]))
            start, _ = self._around.behind.last(thread, begin, otherwise=begin)
            add = self._around.gap
        if stop < len(again):
            end = int(calls.start[again[stop]])
        else:
            end = int(max(calls.end[again[-1]], calls.end[outer]))
            moment, row = self._around.before.next(thread, end, otherwise=end)
            # Up to another recompute: that one's own preparation.
            if row >= 0 and not self._around.recomputed[row]:
                end = moment
        add += self._moved(sequence)
        # A function that goes through its block in parts has the backward pass of one before the
        # next: that stays.
        behind = rows[:-1] + 1 + calls.size[rows[:-1]]
        for place in np.flatnonzero(self._backwards[rows[1:]] > self._backwards[behind]).tolist():
            yield TimeEdit(thread, start, int(calls.end[rows[place]]), gone=True, add=add)
            start, add = int(calls.start[rows[place + 1]]), 0.0
        yield TimeEdit(thread, start, end, gone=True, add=add)

    def _of_functions(self, goes: Sequence[bool]) -> Iterator[TimeEdit]:
        """What a function that goes copies, and does beside its block and its backward pass."""
        calls, here = self._facts.calls, self._around.here
        for owned in (self._around.own_copies, self._around.own_passes):
            gone = owned.rows[np.asarray(goes, np.bool_)[owned.sequence] & here[owned.rows]]
            times = (calls.thread[gone], calls.start[gone], calls.end[gone])
            for thread, start, end in zip(*(one.tolist() for one in times), strict=True):
                yield TimeEdit(thread, start, end, gone=True)

    def _end_of_node(self, sequence: OpSequence) -> Iterator[TimeEdit]:
        """What a reentrant checkpoint's node still does behind its nested backward pass."""
        calls, rows = self._facts.calls, self._rows(sequence)
        known = max(sequence.runs, sequence.run + 1) <= len(sequence.checkpoints)
        if not known or sequence.checkpoints[sequence.run].variant != "reentrant":
            return
        node = int(calls.parent[rows[0]])
        while node >= 0 and not self._around.checkpoint_node[node]:
            node = int(calls.parent[node])
        engine = self._facts.alignment.recomputes[sequence.recompute].engine
        if node < 0 or self._facts.structure.engine[node] != engine:
            return
        inside = np.arange(node + 1, node + 1 + int(calls.size[node]))
        inside = inside[self._facts.structure.role[inside] == Role.BACKWARD]
        end = int(calls.end[node])
        last = int(calls.end[np.append(rows[-1:], inside)].max())
        yield TimeEdit(int(calls.thread[node]), last, end, gone=True)

    def _moved(self, sequence: OpSequence) -> float:
        """What the checkpoint that stays did in a run that goes, and will do in the first run.

        Under a reentrant checkpoint a non-reentrant one inside does nothing in the forward pass,
        which records no gradients; it saves the state of random numbers and sets its hooks up in
        the first recompute. Shown by the annotations of ``run`` alone. In ns.
        """
        kept, rows = self._kept(sequence), self._rows(sequence)
        recorded_first = with_gradients(self._facts, self._originals(sequence))
        if kept is None or kept.variant != "non-reentrant" or recorded_first:
            return 0.0
        if not with_gradients(self._facts, rows):
            return 0.0
        return self._around.checkpoint_overhead.before_region(int(rows[0]))

    def _range_of(self, rows: Int64) -> int:
        """Row of the outermost range around these operators that holds no recompute that stays."""
        calls, role = self._facts.calls, self._facts.structure.role
        found = int(rows[0])
        row = int(calls.parent[found])
        while row >= 0 and role[row] == Role.RANGE and not self._around.checkpoint_node[row]:
            stop = row + int(calls.size[row]) + 1
            if calls.end[row] < calls.end[rows[-1]] or self._staying[stop] > self._staying[row]:
                break
            found, row = row, int(calls.parent[row])
        return found

    # -- what changes ------------------------------------------------------------------------

    def _changed_forward(self, sequence: OpSequence) -> Iterator[TimeEdit | HookedEdit]:
        """The first run of operators whose checkpoint goes."""
        rows, kept = self._originals(sequence), self._kept(sequence)
        run = self._around.recordings.of(rows, rows)
        # Where it is not known what is around them, they stay as they are.
        if sequence.checkpoints and (kept is None or kept.variant != "reentrant"):
            more = _hooked(kept) * run.saved - _hooked(*sequence.checkpoints) * run.measured
            yield self._changed(rows, more, run)
        yield from self._around.checkpoint_overhead.gone(sequence.checkpoints, kept, rows)

    def _changed_recompute(self, sequence: OpSequence) -> Iterator[TimeEdit | HookedEdit]:
        """A run again that stays where another goes."""
        rows, kept = self._rows(sequence), self._kept(sequence)
        if kept is None:
            return
        run = self._around.recordings.of(rows, self._originals(sequence))
        more = _hooked(kept) * run.saved - _hooked(*sequence.checkpoints) * run.measured
        yield self._changed(rows, more, run)
        yield from self._around.checkpoint_overhead.gone(sequence.checkpoints, kept, rows)

    def _unpacking(self) -> Iterator[HookedEdit]:
        """The backward pass behind the last run of a block, which asks for what was saved."""
        more: Counter[int] = Counter()
        for sequence in self._around.sequences:
            kept = self._kept(sequence)
            was, will = _hooked(*sequence.checkpoints), _hooked(kept)
            last = sequence.run == sequence.runs - 1 and self._is_here(sequence)
            if last and was != will and (kept is not None or self._keep is None):
                rows = self._originals(sequence)
                saved = self._around.recordings.of(rows, rows).saved
                more[sequence.recompute] += saved * (will - was)
        for recompute, saved in more.items():
            yield self._unpacked(self._facts.alignment.recomputes[recompute].again, saved)

    def _unpacked(self, rows: Int64, saved: int) -> HookedEdit:
        """So many tensors more are unpacked between these operators and the next recompute."""
        calls = self._facts.calls
        thread, start = int(calls.thread[rows[-1]]), int(calls.end[rows[-1]])
        step = min(int(self._ends.searchsorted(start, side="right")), len(self._ends) - 1)
        until, _ = self._around.begins.next(thread, start, otherwise=int(self._ends[step]))
        until = min(until, int(self._ends[step]))
        end, _ = self._around.nodes.last(thread, until, otherwise=start)
        return lambda hooks, _: TimeEdit(
            thread, start, max(start, end), gone=False, add=hooks.hook_ns * saved
        )

    def _changed(self, rows: Int64, more: int, run: Recording) -> HookedEdit:
        """A run that is recorded, and packs so many tensors more."""
        calls, first, last = self._facts.calls, int(rows[0]), int(rows[-1])
        thread, start, end = int(calls.thread[first]), int(calls.start[first]), int(calls.end[last])
        return lambda hooks, lengths: TimeEdit(
            thread, start, end, gone=False, add=hooks.hook_ns * more + run.more(hooks, lengths)
        )

    def _rows(self, sequence: OpSequence) -> Int64:
        recompute = self._facts.alignment.recomputes[sequence.recompute]
        return recompute.again[sequence.first : sequence.stop]

    def _originals(self, sequence: OpSequence) -> Int64:
        recompute = self._facts.alignment.recomputes[sequence.recompute]
        return recompute.original[sequence.first : sequence.stop]


def _hooked(*checkpoints: Checkpoint | None) -> bool:
    """Does the innermost of these, if there is one, keep a hook at each saved tensor?"""
    last = checkpoints[-1] if checkpoints else None
    return last is not None and last.variant == "non-reentrant"
