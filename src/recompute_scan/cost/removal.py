"""The intervals of host time that go or change when checkpoints go.

Run number k again of a block's operators belongs to the block's k-th checkpoint, counted from
outside, where each of them runs it once. With a checkpoint goes its run, and its own work
(unpacking, keeping inputs and the state of random numbers), which shows as time between operators:

* from whatever came before the recompute to its first operator;
* after a reentrant recompute, up to the nested backward pass, and behind that;
* in the forward pass, between the beginning of a checkpoint function and its first operator, and
  behind the last. Where ``recompute-scan run`` recorded, annotations separate this time from the
  time of the checkpointed function itself.

The runs that stay change too (:mod:`recompute_scan.cost.reruns`). A non-reentrant recompute ends at
the last tensor that its first run saved, unless early stop is switched off
(``torch/utils/checkpoint.py``, ``set_checkpoint_early_stop``). A reentrant recompute, or one with a
reentrant checkpoint inside, runs to its end. So where the reentrant one goes, the recompute that
stays gets shorter.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct

from recompute_scan.annotations import ANNOTATING, EARLY_STOP_OFF, REGION, SELECTIVE
from recompute_scan.cost.reruns import (
    Hooks,
    Keep,
    Lengths,
    OpSequence,
    Recording,
    Recordings,
    find_own_copies,
    find_own_passes,
    find_reaches,
    find_sequences,
)
from recompute_scan.numpy_tools import changes, median, split
from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.roles import Role, roles_in
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.result import Checkpoint
from recompute_scan.trace.calls import Calls
from recompute_scan.trace.columns import Bool, Int32, Int64

# To end a recompute by an exception takes at most this share of it.
_MOST_STOP = 0.25


class TimeEdit(Struct, frozen=True):
    """A change to one interval of one host thread.

    Attributes:
        thread: Code of the thread.
        start: Its beginning in the trace, ns.
        end: Its end, ns.
        gone: Whether the work in it goes, with all that it launched.
        add: Time that takes its place (``gone``) or comes on top, ns; may be negative.
    """

    thread: int
    start: int
    end: int
    gone: bool
    add: float = 0.0


# An edit that depends on how long hooks, and calls, take.
HookedEdit = Callable[[Hooks, Lengths], TimeEdit]


def find_early_stop(facts: RecomputeFacts, sequences: Sequence[OpSequence]) -> bool | None:
    """Whether non-reentrant recomputes stop early; ``None`` where nothing shows it.

    Annotations say where it is off. Without them one is seen to stop where its last operator was
    entered and did nothing. One is seen to run on where a further non-reentrant checkpoint is right
    inside and ran, too: all that is saved there are its inputs, which are there before it begins.
    """
    if facts.annotations is not None:
        return True
    alignment = facts.alignment
    times = np.bincount(alignment.places, minlength=len(alignment.forward))
    for sequence in sequences:
        recompute = alignment.recomputes[sequence.recompute]
        kinds = [each.variant == "non-reentrant" for each in sequence.checkpoints]
        known = sequence.run < sequence.runs == len(kinds)
        if not known or not kinds[sequence.run] or sequence.stop < len(recompute.again):
            continue
        if recompute.ran[:-1].all() and not recompute.ran[-1]:
            return True
        edges = alignment.forward.searchsorted(recompute.original[[sequence.first, -1]])
        if any(kinds[sequence.run + 1 : sequence.run + 2]) and times[edges[0]] == times[edges[1]]:
            return False
    return None


def stopped(
    facts: RecomputeFacts, recordings: Recordings, sequence: OpSequence, kept: Checkpoint | None
) -> HookedEdit | None:
    """The end of a recompute that stays, if nothing inside keeps it from stopping early now."""
    recompute = facts.alignment.recomputes[sequence.recompute]
    if kept is None or kept.variant != "non-reentrant" or sequence.stop < len(recompute.again):
        return None
    known = {EARLY_STOP_OFF, SELECTIVE} & {*kept.options}
    if known or sequence.checkpoints[-1].variant != "reentrant":
        return None
    calls = facts.calls
    rows = sequence.again
    stop = recordings.stop(rows, recordings.of(rows, sequence.originals))
    function = int(facts.structure.function[rows[-1]])
    end = max(int(calls.end[rows[-1]]), int(calls.end[function]) if function >= 0 else 0)
    if stop is None or stop >= end:
        return None
    # An exception passes no more frames than the run had time for.
    most = _MOST_STOP * float(calls.end[rows[-1]] - calls.start[rows[0]])
    thread = int(calls.thread[rows[-1]])
    return lambda hooks, _: TimeEdit(thread, stop, end, gone=True, add=min(hooks.stop_ns, most))


_WORK = roles_in(Role.FORWARD, Role.FORMULA, Role.OPTIMIZER, Role.BACKWARD, Role.OWN_WORK)


_NONE = np.empty(0, np.int64)


class Moments:
    """Moments of some calls, by thread.

    Args:
        thread: Thread of each call.
        kinds: Which calls, and the moment of each call; several kinds may be given.
    """

    def __init__(self, thread: Int32, kinds: Sequence[tuple[Bool, Int64]]) -> None:
        rows = np.concatenate([np.flatnonzero(among) for among, _ in kinds])
        times = np.concatenate([moment[among] for among, moment in kinds])
        order = np.lexsort((times, thread[rows]))
        rows, times = rows[order], times[order]
        firsts = np.flatnonzero(changes(thread[rows]))
        codes = thread[rows[firsts]].tolist()
        both = zip(split(times, firsts), split(rows, firsts), strict=True)
        self._of_thread: dict[int, tuple[Int64, Int64]] = dict(zip(codes, both, strict=True))

    def last(self, thread: int, time: int, *, otherwise: int) -> tuple[int, int]:
        """The last moment at or before ``time`` and its call's row; ``otherwise`` and -1."""
        times, rows = self._of_thread.get(thread, (_NONE, _NONE))
        place = int(times.searchsorted(time, side="right")) - 1
        return (int(times[place]), int(rows[place])) if place >= 0 else (otherwise, -1)

    def next(self, thread: int, time: int, *, otherwise: int) -> tuple[int, int]:
        """The first moment at or after ``time`` and its call's row; ``otherwise`` and -1."""
        times, rows = self._of_thread.get(thread, (_NONE, _NONE))
        place = int(times.searchsorted(time, side="left"))
        return (int(times[place]), int(rows[place])) if place < len(times) else (otherwise, -1)


def typical_gap(facts: RecomputeFacts, rows: Int64) -> float:
    """The usual time from one of these calls to the next on its thread, ns."""
    calls = facts.calls
    between = calls.start[rows[1:]] - calls.end[rows[:-1]]
    between = between[(calls.thread[rows[1:]] == calls.thread[rows[:-1]]) & (between >= 0)]
    return median(between) if len(between) else 0.0


class Context:
    """The surroundings of the operators that ran again, found once for all removals.

    The steps to change are between two moments, in ns.
    """

    def __init__(self, facts: RecomputeFacts, begin: int, end: int) -> None:
        calls, role, again = facts.calls, facts.structure.role, facts.alignment.again
        self.facts = facts
        self.here = here = (calls.start < end) & (calls.end > begin)
        self.recomputed = np.zeros(len(calls), np.bool_)
        self.recomputed[again] = True
        # The recomputes, in pieces of a kind, and from which place in its recompute up to which
        # all goes with each piece.
        self.sequences = find_sequences(facts, here)
        self.reaches = find_reaches(facts, self.sequences)
        self.recordings = Recordings(facts, self.sequences)
        self.own_copies = find_own_copies(facts, self.sequences)
        self.own_passes = find_own_passes(facts, self.sequences)
        self.early_stop = find_early_stop(facts, self.sequences)
        # Nodes of reentrant checkpoints, and all nodes.
        nodes = vocabulary.nodes_of(facts.structure.functions.names)
        self.checkpoint_node = calls.where(nodes.__contains__)
        above = np.maximum(calls.parent, 0)
        node = (role == Role.FORMULA) & (role[above] == Role.BACKWARD) & (calls.parent >= 0)
        # The calls that time between operators can begin behind, and those that it can end before.
        work = here & (self.recomputed | _WORK[role])
        ranges = (role == Role.RANGE) & ~calls.where(ANNOTATING.__eq__)
        ranges &= here & ~self.checkpoint_node
        nodes = here & (node | self.checkpoint_node)
        self.behind = Moments(calls.thread, ((work | ranges, calls.end), (nodes, calls.start)))
        self.before = Moments(calls.thread, ((work, calls.start),))
        done = work | ranges | (here & (role == Role.PLUMBING))
        self._done = Moments(calls.thread, ((done, calls.end),))
        operators = here & (self.recomputed | (role == Role.FORWARD))
        self._operators = Moments(calls.thread, ((operators, calls.start),))
        # When recomputes begin, and when the outermost nodes of backward passes end.
        begins, roots = np.zeros((2, len(calls)), np.bool_)
        begins[again[facts.alignment.begins]] = True
        roots[facts.structure.roots] = True
        self.begins = Moments(calls.thread, ((begins, calls.start),))
        self.nodes = Moments(calls.thread, ((roots, calls.end),))
        # The usual time between two nodes, and between two operators, ns.
        self.gap = typical_gap(facts, facts.structure.roots)
        self._forward_gap = typical_gap(facts, facts.alignment.forward)

    def around_run(
        self, checkpoints: Sequence[Checkpoint], kept: Checkpoint | None, rows: Int64
    ) -> Iterator[TimeEdit]:
        """The work of all these checkpoints but one, before and behind a run of the operators."""
        calls = self.facts.calls
        if any(c.variant == "reentrant" for c in checkpoints if c is not kept):
            yield from self._function(rows)
        annotations = self.annotations_around(int(rows[0]))
        thread, first = int(calls.thread[rows[0]]), int(calls.start[rows[0]])
        for checkpoint, annotation in zip(reversed(checkpoints), annotations, strict=False):
            start = int(calls.start[annotation])
            if checkpoint is kept or self._operators.next(thread, start, otherwise=-1)[0] != first:
                continue
            parent = int(calls.parent[annotation])
            begin, _ = self._done.last(thread, start, otherwise=start)
            if parent >= 0 and self.facts.structure.role[parent] == Role.RANGE:
                begin = max(begin, int(calls.start[parent]))
            yield TimeEdit(thread, begin, start, gone=True, add=self._forward_gap)

    def annotations_around(self, row: int) -> list[int]:
        """Rows of the calls that begin the checkpointed regions around an operator, inside first.

        A region's range, or the checkpoint function that it is in.
        """
        calls, structure = self.facts.calls, self.facts.structure
        found = []
        for above in calls.above(row):
            if structure.role[above] != Role.RANGE:
                break
            if calls.called(above).startswith(REGION):
                parent = int(calls.parent[above])
                function = parent >= 0 and parent == structure.function[above]
                found.append(parent if function else above)
        return found

    def _function(self, rows: Int64) -> Iterator[TimeEdit]:
        """The work of a checkpoint function before and behind its operators, which goes with it.

        Where an annotation marks the time of the function that it runs, that stays.
        """
        calls = self.facts.calls
        function = int(self.facts.structure.function[rows[0]])
        if function < 0 or self.facts.structure.function[rows[-1]] != function:
            return
        thread = int(calls.thread[function])
        first, last = int(calls.start[function]), int(calls.end[function])
        begin, end, gap = int(calls.start[rows[0]]), int(calls.end[rows[-1]]), self._forward_gap
        alone = self._operators.next(thread, first, otherwise=-1)[0] == begin
        inside = self._below(int(rows[0]), function)
        if inside is not None and calls.end[inside] >= end:
            begin, end, gap = int(calls.start[inside]), int(calls.end[inside]), 0.0
        if alone:
            yield TimeEdit(thread, first, begin, gone=True, add=gap)
        if self._operators.next(thread, end, otherwise=last)[0] >= last:
            yield TimeEdit(thread, end, last, gone=True)

    def _below(self, row: int, function: int) -> int | None:
        """Row of the range right inside a checkpoint function that an operator is in."""
        calls, role = self.facts.calls, self.facts.structure.role
        inside = itertools.takewhile(lambda above: above > function, calls.above(row))
        below = next((above for above in inside if calls.parent[above] == function), -1)
        return below if below >= 0 and role[below] == Role.RANGE else None


def annotation_edits(facts: RecomputeFacts) -> list[TimeEdit]:
    """The time that the run wrapper itself took to name checkpoints: never part of a step."""
    return gone(facts.calls, np.flatnonzero(facts.calls.where(ANNOTATING.__eq__)))


def gone(calls: Calls, rows: Int64) -> list[TimeEdit]:
    """The edits that take these calls out."""
    columns = (one[rows].tolist() for one in (calls.thread, calls.start, calls.end))
    each = zip(*columns, strict=True)
    return [TimeEdit(thread, start, end, gone=True) for thread, start, end in each]


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
        # How many recomputed operators that stay, and how many nodes, ran before each call.
        self._staying = np.zeros(len(around.facts.calls) + 1, np.int32)
        self._backwards = np.zeros(len(around.facts.calls) + 1, np.int32)
        np.cumsum(self._facts.structure.role == Role.BACKWARD, out=self._backwards[1:])
        self._ends = np.array([step.end for step in self._facts.steps], np.int64)

    def edits(
        self, hooks: Hooks, lengths: Lengths, *, early_stop: bool | None = None
    ) -> list[TimeEdit]:
        """The edits. Recomputes that nothing keeps from it stop early as given; where that is
        ``None``, unless the trace shows that they do not.
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
                staying[sequence.again] = False
        np.cumsum(staying, out=self._staying[1:])
        changed: set[int] = set()
        for sequence, reach, going in zip(sequences, self._around.reaches, goes, strict=True):
            if not self._is_here(sequence):
                continue
            if not going:
                if sequence.runs > 1 and self._kept(sequence) is not None:
                    rows = sequence.again
                    yield from self._changed_run(sequence, rows, again=True)
                continue
            yield from self._gone(sequence, reach)
            yield from self._end_of_node(sequence)
            originals = sequence.originals
            if int(originals[0]) not in changed:
                changed.add(int(originals[0]))
                yield from self._changed_run(sequence, originals, again=False)
        for own in (self._around.own_copies, self._around.own_passes):
            here = np.array(goes, np.bool_)[own.owner] & self._around.here[own.rows]
            yield from gone(self._facts.calls, own.rows[here])
        yield from self._unpacking()

    @cached_property
    def _stops(self) -> list[HookedEdit]:
        """The ends that early stop leaves out of recomputes that stay."""
        around = self._around
        return [
            edit
            for sequence in around.sequences
            if sequence.runs > 1 and self._is_here(sequence) and not self._goes(sequence)
            if (edit := stopped(around.facts, around.recordings, sequence, self._kept(sequence)))
        ]

    def _is_here(self, sequence: OpSequence) -> bool:
        here = self._around.here
        both = sequence.again, sequence.originals
        return any(here[rows[0]] or here[rows[-1]] for rows in both)

    def _goes(self, sequence: OpSequence) -> bool:
        if self._keep is None or sequence.runs < 2:
            return self._keep is None
        kept = self._kept(sequence)
        if kept is not None and sequence.runs == len(sequence.checkpoints):
            return sequence.run != sequence.checkpoints.index(kept)
        return sequence.run < sequence.runs - 1

    def _kept(self, sequence: OpSequence) -> Checkpoint | None:
        if self._keep is None or not sequence.checkpoints:
            return None
        return self._keep(sequence.checkpoints)

    def _gone(self, sequence: OpSequence, reach: tuple[int, int]) -> Iterator[TimeEdit]:
        calls = self._facts.calls
        again = self._facts.alignment.recomputes[sequence.recompute].again
        rows = sequence.again
        thread = int(calls.thread[rows[0]])
        first, stop = reach
        if first == stop:
            return
        outer = self._range_of(rows)
        add, start = 0.0, int(calls.start[rows[0]])
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
        # A function that goes through its block in parts has the backward pass of one before the
        # next: that stays.
        behind = rows[:-1] + 1 + calls.size[rows[:-1]]
        for place in np.flatnonzero(self._backwards[rows[1:]] > self._backwards[behind]).tolist():
            yield TimeEdit(thread, start, int(calls.end[rows[place]]), gone=True, add=add)
            start, add = int(calls.start[rows[place + 1]]), 0.0
        yield TimeEdit(thread, start, end, gone=True, add=add)

    def _end_of_node(self, sequence: OpSequence) -> Iterator[TimeEdit]:
        """The work of a reentrant checkpoint's node behind its nested backward pass."""
        calls, rows = self._facts.calls, sequence.again
        known = max(sequence.runs, sequence.run + 1) <= len(sequence.checkpoints)
        if not known or sequence.checkpoints[sequence.run].variant != "reentrant":
            return
        nodes = self._around.checkpoint_node
        node = next((above for above in calls.above(rows[0]) if nodes[above]), -1)
        engine = self._facts.alignment.recomputes[sequence.recompute].engine
        if node < 0 or self._facts.structure.engine[node] != engine:
            return
        inside = np.arange(node + 1, node + 1 + int(calls.size[node]))
        inside = inside[self._facts.structure.role[inside] == Role.BACKWARD]
        end = int(calls.end[node])
        last = int(calls.end[np.append(rows[-1:], inside)].max())
        yield TimeEdit(int(calls.thread[node]), last, end, gone=True)

    def _range_of(self, rows: Int64) -> int:
        """Row of the outermost range around these operators that holds no recompute that stays."""
        calls, role = self._facts.calls, self._facts.structure.role
        found = int(rows[0])
        for row in calls.above(found):
            stop = row + int(calls.size[row]) + 1
            holds = calls.end[row] < calls.end[rows[-1]] or self._staying[stop] > self._staying[row]
            if role[row] != Role.RANGE or self._around.checkpoint_node[row] or holds:
                break
            found = row
        return found

    def _changed_run(
        self, sequence: OpSequence, rows: Int64, *, again: bool
    ) -> Iterator[TimeEdit | HookedEdit]:
        """A run that stays where another one of the same operators goes.

        A first run stays as it is under a reentrant checkpoint, and where the checkpoints around it
        are not known.
        """
        kept = self._kept(sequence)
        run = self._around.recordings.of(rows, sequence.originals)
        if again or (sequence.checkpoints and (kept is None or kept.variant != "reentrant")):
            more = _hooked(kept) * run.saved - _hooked(*sequence.checkpoints) * run.measured
            yield self._changed(rows, more, run)
        yield from self._around.around_run(sequence.checkpoints, kept, rows)

    def _unpacking(self) -> Iterator[HookedEdit]:
        """The backward pass behind the last run of a block, which asks for what was saved."""
        more: Counter[int] = Counter()
        for sequence in self._around.sequences:
            kept = self._kept(sequence)
            was, will = _hooked(*sequence.checkpoints), _hooked(kept)
            last = sequence.run == sequence.runs - 1 and self._is_here(sequence)
            if last and was != will and (kept is not None or self._keep is None):
                rows = sequence.originals
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


def _hooked(*checkpoints: Checkpoint | None) -> bool:
    """Does the innermost of these, if there is one, keep a hook at each saved tensor?"""
    last = checkpoints[-1] if checkpoints else None
    return last is not None and last.variant == "non-reentrant"
