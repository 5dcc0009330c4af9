"""What becomes of the host's time when a checkpoint is taken out.

Run number k again of a block's operators is asked for by its k-th checkpoint, counted from
outside, where each of them asks for one: so the run of the one that goes is the one that goes.
With it goes the checkpoint's own work, which shows as time between operators:

* from whatever came before the replay to its first operator (unpacking, restoring the state of
  random numbers);
* after a reentrant replay, up to the nested backward pass, and behind that;
* in the forward pass, what lies between the beginning of a checkpoint function and its first
  operator, and behind the last.

What stays changes too. A run without gradients becomes one with them where no reentrant
checkpoint is left around it, a non-reentrant checkpoint keeps a hook at every tensor that autograd
saves (:mod:`recompute_scan.cost.hooks`), and its replay, if a reentrant one inside made it run to
its end, stops at the last of these.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recompute_scan.annotations import EARLY_STOP_OFF, SELECTIVE
from recompute_scan.cost.clock import TimeEdit
from recompute_scan.cost.entries import Surroundings
from recompute_scan.cost.hooks import Hooks, stopped_at
from recompute_scan.cost.reruns import Keep, Stretch, with_gradients
from recompute_scan.recompute.structure import Role
from recompute_scan.result import Checkpoint
from recompute_scan.trace.columns import Int64

# Of a replay, what ending it by an exception takes at most.
_MOST_STOP = 0.25


def removal(around: Surroundings, keep: Keep | None, hooks: Hooks) -> list[TimeEdit]:
    """The edits that leave one checkpoint around each block, or none.

    Args:
        around: What ran again, in the steps that matter; others have no edits.
        keep: Of the checkpoints around a block, the one that stays; where that is ``None`` every
            checkpoint goes. Where the checkpoints are not known the last run stays.
        hooks: What autograd and a non-reentrant checkpoint take for what they save.
    """
    return list(_Removal(around, keep, hooks).edits())


class _Removal:
    def __init__(self, around: Surroundings, keep: Keep | None, hooks: Hooks) -> None:
        self._around = around
        self._facts = around.facts
        self._keep = keep
        self._hooks = hooks
        self._staying = np.zeros(len(around.facts.calls) + 1, np.int32)

    def edits(self) -> Iterator[TimeEdit]:
        stretches = self._around.stretches
        goes = [self._goes(stretch) for stretch in stretches]
        staying = self._around.replayed.copy()
        for stretch, going in zip(stretches, goes, strict=True):
            if going:
                staying[self._rows(stretch)] = False
        np.cumsum(staying, out=self._staying[1:])
        changed: set[int] = set()
        for stretch, going in zip(stretches, goes, strict=True):
            if not self._is_here(stretch):
                continue
            if not going:
                if stretch.runs > 1:
                    yield from self._changed_replay(stretch)
                continue
            yield self._gone(stretch)
            yield from self._end_of_node(stretch)
            first = int(self._originals(stretch)[0])
            if first not in changed:
                changed.add(first)
                yield from self._changed_forward(stretch)

    def _is_here(self, stretch: Stretch) -> bool:
        rows, first = self._rows(stretch), self._originals(stretch)
        return bool(self._around.here[[rows[0], rows[-1], first[0], first[-1]]].any())

    # -- what goes ---------------------------------------------------------------------------

    def _goes(self, stretch: Stretch) -> bool:
        if self._keep is None:
            return True
        if stretch.runs < 2:
            return False
        kept = self._kept(stretch)
        if kept is not None and stretch.runs == len(stretch.checkpoints):
            return stretch.run != stretch.checkpoints.index(kept)
        return stretch.run < stretch.runs - 1

    def _kept(self, stretch: Stretch) -> Checkpoint | None:
        if self._keep is None or not stretch.checkpoints:
            return None
        return self._keep(stretch.checkpoints)

    def _gone(self, stretch: Stretch) -> TimeEdit:
        calls = self._facts.calls
        again = self._facts.alignment.replays[stretch.replay].again
        rows = self._rows(stretch)
        thread = int(calls.thread[rows[0]])
        outer = self._range_of(rows)
        add = 0.0
        start, end = int(calls.start[rows[0]]), int(calls.end[rows[-1]])
        if stretch.first == 0:
            begin = min(start, int(calls.start[outer]))
            start, _ = self._around.behind.last(thread, begin, otherwise=begin)
            add = self._around.gap
        if stretch.stop < len(again):
            end = int(calls.start[again[stretch.stop]])
        else:
            end = max(end, int(calls.end[outer]))
            moment, row = self._around.before.next(thread, end, otherwise=end)
            # Up to another replay: that one's own preparation.
            if row >= 0 and not self._around.replayed[row]:
                end = moment
        return TimeEdit(thread, start, end, gone=True, add=add + self._moved(stretch))

    def _end_of_node(self, stretch: Stretch) -> Iterator[TimeEdit]:
        """What a reentrant checkpoint's node still does behind its nested backward pass."""
        calls, rows = self._facts.calls, self._rows(stretch)
        known = stretch.runs <= len(stretch.checkpoints)
        if not known or stretch.checkpoints[stretch.run].variant != "reentrant":
            return
        node = int(calls.parent[rows[0]])
        while node >= 0 and not self._around.checkpoint_node[node]:
            node = int(calls.parent[node])
        if node < 0:
            return
        inside = np.arange(node + 1, node + 1 + int(calls.size[node]))
        end, last = int(calls.end[node]), int(calls.end[inside].max())
        yield TimeEdit(int(calls.thread[node]), last, end, gone=True)

    def _moved(self, stretch: Stretch) -> float:
        """What the checkpoint that stays did in a run that goes, and will do in the first run.

        Under a reentrant checkpoint a non-reentrant one inside does nothing in the forward pass,
        which records no gradients; it saves the state of random numbers and sets its hooks up in
        the first replay. Shown by the marks of ``run`` alone. In ns.
        """
        kept, calls = self._kept(stretch), self._facts.calls
        rows = self._rows(stretch)
        recorded_first = with_gradients(self._facts, self._originals(stretch))
        if kept is None or kept.variant != "non-reentrant" or recorded_first:
            return 0.0
        marks = self._around.entries.marks_round(int(rows[0]))
        if not marks or not with_gradients(self._facts, rows):
            return 0.0
        mark = marks[0]
        parent = int(calls.parent[mark])
        if parent < 0 or self._facts.structure.role[parent] != Role.RANGE:
            return 0.0
        inside = np.arange(parent + 1, mark)
        ours = inside[self._around.marking[inside]]
        return float(calls.start[mark] - calls.start[parent] - calls.duration[ours].sum())

    def _range_of(self, rows: Int64) -> int:
        """Row of the outermost range around these operators that holds no replay that stays."""
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

    def _changed_forward(self, stretch: Stretch) -> Iterator[TimeEdit]:
        """The first run of operators whose checkpoint goes."""
        rows, hooks = self._originals(stretch), self._hooks
        kept, before = self._kept(stretch), _innermost(stretch)
        saved = int(self._around.saved[rows].sum())
        recorded = with_gradients(self._facts, rows)
        was = recorded and before == "non-reentrant"
        known = bool(stretch.checkpoints)
        records = recorded if not known else kept is None or kept.variant != "reentrant"
        will = kept is not None and kept.variant == "non-reentrant"
        add = hooks.pack_ns * saved * (int(will) - int(was))
        if records and not recorded:
            add += hooks.gradient_ns * saved
        if self._keep is None and before == "non-reentrant":
            add -= hooks.unpack_ns * saved
        yield self._changed(rows, add)
        yield from self._around.entries.gone(stretch.checkpoints, kept, rows)

    def _changed_replay(self, stretch: Stretch) -> Iterator[TimeEdit]:
        """A run again that stays where another goes."""
        rows, hooks = self._rows(stretch), self._hooks
        kept, before = self._kept(stretch), _innermost(stretch)
        if kept is None:
            return
        saved = int(self._around.saved[rows].sum())
        recorded = with_gradients(self._facts, rows)
        was = recorded and before == "non-reentrant"
        will = kept.variant == "non-reentrant"
        add = hooks.repack_ns * saved * (int(will) - int(was))
        add += hooks.unpack_ns * saved * (int(will) - int(before == "non-reentrant"))
        if not recorded:
            add += hooks.gradient_ns * saved
        yield self._changed(rows, add)
        yield from self._around.entries.gone(stretch.checkpoints, kept, rows)
        yield from self._stopped(stretch, kept)

    def _stopped(self, stretch: Stretch, kept: Checkpoint) -> Iterator[TimeEdit]:
        """The end of a replay that nothing inside keeps from stopping early any more."""
        rows = self._rows(stretch)
        last = stretch.stop == len(self._facts.alignment.replays[stretch.replay].again)
        early = kept.variant == "non-reentrant" and not {EARLY_STOP_OFF, SELECTIVE} & {
            *kept.options
        }
        if not last or not early or _innermost(stretch) != "reentrant":
            return
        calls = self._facts.calls
        stop = stopped_at(calls, rows)
        if stop is None:
            return
        function = int(self._facts.structure.function[rows[-1]])
        end = max(int(calls.end[rows[-1]]), int(calls.end[function]) if function >= 0 else 0)
        # An exception passes no more frames than the run had time for.
        most = _MOST_STOP * float(calls.end[rows[-1]] - calls.start[rows[0]])
        add = min(self._hooks.stop_ns, most)
        yield TimeEdit(int(calls.thread[rows[-1]]), stop, end, gone=True, add=add)

    def _changed(self, rows: Int64, add: float) -> TimeEdit:
        calls = self._facts.calls
        thread, start, end = calls.thread[rows[0]], calls.start[rows[0]], calls.end[rows[-1]]
        return TimeEdit(int(thread), int(start), int(end), gone=False, add=add)

    def _rows(self, stretch: Stretch) -> Int64:
        replay = self._facts.alignment.replays[stretch.replay]
        return replay.again[stretch.first : stretch.stop]

    def _originals(self, stretch: Stretch) -> Int64:
        replay = self._facts.alignment.replays[stretch.replay]
        return replay.original[stretch.first : stretch.stop]


def _innermost(stretch: Stretch) -> str | None:
    return stretch.checkpoints[-1].variant if stretch.checkpoints else None
