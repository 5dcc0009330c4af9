"""What a checkpoint does before and behind a run of the operators that it checkpoints.

It shows as time between operators: preparing, keeping inputs and the state of random numbers. Where
``recompute-scan run`` recorded, annotations say which of that time is the checkpointed function's
own. What every removal asks of a trace's steps is found once (:class:`Context`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from recompute_scan.annotations import ANNOTATING, REGION
from recompute_scan.arrays import changes, median, split
from recompute_scan.cost.clock import TimeEdit
from recompute_scan.cost.early_stop import find_early_stop
from recompute_scan.cost.gradients import Recordings
from recompute_scan.cost.own_copies import OwnRows, find_own_copies
from recompute_scan.cost.own_passes import find_own_passes
from recompute_scan.cost.reruns import OpSequence, find_reaches, find_sequences
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.recompute.roles import Role, table
from recompute_scan.result import Checkpoint
from recompute_scan.trace.columns import Bool, Int32, Int64

_WORK = table(Role.FORWARD, Role.FORMULA, Role.OPTIMIZER, Role.BACKWARD, Role.OWN_WORK)


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
        self._times: dict[int, Int64] = dict(zip(codes, split(times, firsts), strict=True))
        self._rows: dict[int, Int64] = dict(zip(codes, split(rows, firsts), strict=True))

    def last(self, thread: int, time: int, *, otherwise: int) -> tuple[int, int]:
        """The last moment at or before ``time`` and its call's row; ``otherwise`` and -1."""
        if thread not in self._times:
            return otherwise, -1
        at = int(np.searchsorted(self._times[thread], time, side="right")) - 1
        return self._at(thread, at) if at >= 0 else (otherwise, -1)

    def next(self, thread: int, time: int, *, otherwise: int) -> tuple[int, int]:
        """The first moment at or after ``time`` and its call's row; ``otherwise`` and -1."""
        if thread not in self._times:
            return otherwise, -1
        at = int(np.searchsorted(self._times[thread], time, side="left"))
        return self._at(thread, at) if at < len(self._times[thread]) else (otherwise, -1)

    def _at(self, thread: int, place: int) -> tuple[int, int]:
        return int(self._times[thread][place]), int(self._rows[thread][place])


class CheckpointOverhead:
    """The time that goes with a checkpoint beside its operators.

    Args:
        facts: What ran again.
        done: The calls behind which time between operators can begin.
        operators: The operators.
    """

    def __init__(self, facts: RecomputeFacts, done: Bool, operators: Bool) -> None:
        calls = facts.calls
        self._facts = facts
        self._done = Moments(calls.thread, ((done, calls.end),))
        self._operators = Moments(calls.thread, ((operators, calls.start),))
        self._gap = typical_gap(facts, facts.alignment.forward)

    def gone(
        self, checkpoints: Sequence[Checkpoint], kept: Checkpoint | None, rows: Int64
    ) -> Iterator[TimeEdit]:
        """What all these checkpoints but one do before and behind a run of the operators.

        Args:
            checkpoints: Those around the operators, outermost first.
            kept: The one that stays, if any does.
            rows: The operators, in order.
        """
        calls = self._facts.calls
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
            if parent >= 0 and self._facts.structure.role[parent] == Role.RANGE:
                begin = max(begin, int(calls.start[parent]))
            yield TimeEdit(thread, begin, start, gone=True, add=self._gap)

    def annotations_around(self, row: int) -> list[int]:
        """Rows of the calls that begin the checkpointed regions around an operator, inside first.

        A region's range, or the checkpoint function that it is in.
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

    def before_region(self, row: int) -> float:
        """How long what holds an operator's region runs before it, ns; 0 where nothing does.

        Without the time that the annotation took.
        """
        calls, annotations = self._facts.calls, self.annotations_around(row)
        parent = int(calls.parent[annotations[0]]) if annotations else -1
        if parent < 0 or self._facts.structure.role[parent] != Role.RANGE:
            return 0.0
        inside = np.arange(parent + 1, annotations[0])
        ours = [one for one in inside if calls.names[calls.name[one]] == ANNOTATING]
        before = calls.start[annotations[0]] - calls.start[parent]
        return float(before - calls.duration[ours].sum())

    def _function(self, rows: Int64) -> Iterator[TimeEdit]:
        """What a checkpoint function does before and behind its operators, which goes with it.

        Where an annotation says what of it is the function that it runs, that stays.
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
            yield TimeEdit(thread, first, begin, gone=True, add=gap)
        if self._operators.next(thread, end, otherwise=last)[0] >= last:
            yield TimeEdit(thread, end, last, gone=True)

    def _below(self, row: int, function: int) -> int | None:
        """Row of the range right inside a checkpoint function that an operator is in."""
        calls, role = self._facts.calls, self._facts.structure.role
        above = int(calls.parent[row])
        while above > function and calls.parent[above] != function:
            above = int(calls.parent[above])
        return above if above > function and role[above] == Role.RANGE else None


def typical_gap(facts: RecomputeFacts, rows: Int64) -> float:
    """The usual time from one of these calls to the next on its thread, ns."""
    calls = facts.calls
    if len(rows) < 2:
        return 0.0
    between = calls.start[rows[1:]] - calls.end[rows[:-1]]
    between = between[(calls.thread[rows[1:]] == calls.thread[rows[:-1]]) & (between >= 0)]
    return median(between) if len(between) else 0.0


class Context(Struct, frozen=True):
    """What surrounds the operators that ran again.

    Attributes:
        facts: What ran again.
        sequences: The recomputes in them, in pieces of a kind.
        reaches: For each piece: from which place in its recompute up to which all goes with it.
        here: For each call: does it touch the steps that matter?
        recomputed: For each call: is it an operator that ran again?
        recordings: The runs with gradients.
        own_copies: What checkpoint functions copy for themselves.
        own_passes: What their nodes do in the backward pass that their blocks would not.
        checkpoint_node: For each call: is it the node of a reentrant checkpoint?
        behind: What the time between operators can begin behind.
        before: What it can end before.
        begins: When recomputes begin.
        nodes: When the outermost nodes of backward passes end.
        checkpoint_overhead: What checkpoints do before and behind operators.
        gap: The usual time between two nodes of the backward pass, ns.
        early_stop: Whether non-reentrant recomputes stop early; ``None`` where nothing shows it.
    """

    facts: RecomputeFacts
    sequences: Sequence[OpSequence]
    reaches: Sequence[tuple[int, int]]
    here: Bool
    recomputed: Bool
    recordings: Recordings
    own_copies: OwnRows
    own_passes: OwnRows
    checkpoint_node: Bool
    behind: Moments
    before: Moments
    begins: Moments
    nodes: Moments
    checkpoint_overhead: CheckpointOverhead
    gap: float
    early_stop: bool | None


def find_context(facts: RecomputeFacts, begin: int, end: int) -> Context:
    """What removals from the steps between these two times, in ns, ask of the trace."""
    calls, role = facts.calls, facts.structure.role
    here = (calls.start < end) & (calls.end > begin)
    recomputed = np.zeros(len(calls), np.bool_)
    recomputed[facts.alignment.again] = True
    above = np.maximum(calls.parent, 0)
    node = (role == Role.FORMULA) & (role[above] == Role.BACKWARD) & (calls.parent >= 0)
    nodes = words.nodes_of(facts.structure.functions.names)
    checkpoint_node = _named(facts, nodes)
    annotating = _named(facts, frozenset({ANNOTATING}))
    work = recomputed | _WORK[role]
    ranges = (role == Role.RANGE) & ~annotating & ~checkpoint_node
    done = here & (work | ranges | (role == Role.PLUMBING))
    operators = here & (recomputed | (role == Role.FORWARD))
    begins, roots = np.zeros((2, len(calls)), np.bool_)
    begins[facts.alignment.again[facts.alignment.begins]] = True
    roots[facts.structure.roots] = True
    sequences = find_sequences(facts, here)
    return Context(
        facts=facts,
        sequences=sequences,
        reaches=find_reaches(facts, sequences),
        here=here,
        recomputed=recomputed,
        recordings=Recordings(facts, sequences),
        own_copies=find_own_copies(facts, sequences),
        own_passes=find_own_passes(facts, sequences),
        checkpoint_node=checkpoint_node,
        behind=Moments(
            calls.thread,
            (
                (here & (work | ranges), calls.end),
                (here & (node | checkpoint_node), calls.start),
            ),
        ),
        before=Moments(calls.thread, ((here & work, calls.start),)),
        begins=Moments(calls.thread, ((begins, calls.start),)),
        nodes=Moments(calls.thread, ((roots, calls.end),)),
        checkpoint_overhead=CheckpointOverhead(facts, done, operators),
        gap=typical_gap(facts, facts.structure.roots),
        early_stop=find_early_stop(facts, sequences),
    )


def annotation_edits(facts: RecomputeFacts) -> list[TimeEdit]:
    """The time that the run wrapper itself took to name checkpoints: never part of a step."""
    calls = facts.calls
    rows = np.flatnonzero(_named(facts, frozenset({ANNOTATING})))
    return [
        TimeEdit(int(calls.thread[row]), int(calls.start[row]), int(calls.end[row]), gone=True)
        for row in rows
    ]


def _named(facts: RecomputeFacts, names: frozenset[str]) -> Bool:
    known = np.array([name in names for name in facts.calls.names], np.bool_)
    return known[facts.calls.name]
