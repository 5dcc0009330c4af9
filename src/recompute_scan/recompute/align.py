"""Finding the forward pass again inside the backward pass: the proof that a call is a replay.

The operators that a backward pass runs where a replay can stand (candidates) form one stretch
per node. Each stretch is cut, from its end, into the longest runs that stand just so (same
names, shapes and types, in the same order) in the forward pass. Three facts say where:

* a checkpoint function's node has the sequence number of the call in the forward pass, and
  the replay lies within that call;
* any other node has the sequence number of the operator whose gradient it computes, and a
  replay that it asked for ends there or close by;
* identical layers are told apart by these two, never by their order alone.

What stands nowhere in the forward pass is no replay and is returned as unexplained.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recompute_scan.model import Calls
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.anchors import Anchor, Anchors
from recompute_scan.recompute.runs import (
    NEAR,
    SHORT_RUN,
    ForwardSequence,
    Run,
    passes_of,
    until_jump,
)
from recompute_scan.recompute.structure import OperatorCodes, Role, Structure
from recompute_scan.recompute.work import Work
from recompute_scan.trace.columns import Bool, Int32, Int64, Kind


@dataclass(frozen=True)
class Replay:
    """One stretch of the forward pass, run again.

    Attributes:
        engine: Row of the engine range in which it ran.
        original: Rows of the forward operators, in order.
        again: Rows of the same operators' second run; same length.
        ran: Whether each really ran. Where early stop cuts a replay short, its last operator
            is entered but does no work; selective checkpointing returns saved results.
        inner_function: It ran inside a checkpoint function's forward: an outer checkpoint
            re-running a reentrant inner one.
    """

    engine: int
    original: Int64
    again: Int64
    ran: Bool
    inner_function: bool


@dataclass(frozen=True)
class Alignment:
    """Every replay of a trace, and the candidates that no part of the forward explains.

    Attributes:
        forward: Rows of all forward operators, in order of (thread, time); costless ones left
            out.
        backwards: One entry per forward row: how many backward passes went through it; 0 for
            an operator without gradients, or whose backward is not in the trace.
        replays: In order of time.
        unexplained: Rows of candidates that match nothing.
    """

    forward: Int64
    backwards: Int64
    replays: tuple[Replay, ...]
    unexplained: Int64


def align(calls: Calls, structure: Structure, work: Work, starts: Int64) -> Alignment:
    """Match every candidate stretch with the forward pass.

    Args:
        calls: The trace's calls.
        structure: Their roles.
        work: Their work on the device; tells operators that were entered but did nothing.
        starts: Start of each step in ns, ascending; a replay repeats work of its own step.
    """
    neutral = calls.matching(words.NEUTRAL)[calls.name]
    forward = np.flatnonzero((structure.role == Role.FORWARD) & ~neutral)
    candidates = np.flatnonzero((structure.role == Role.CANDIDATE) & ~neutral)
    matcher = _Matcher(calls, structure, work, forward, neutral)
    stretches = _stretches(calls, structure, candidates)
    replays, unexplained = _match_all(matcher, stretches, starts, {})
    if heights := _crossings(matcher, stretches, replays):
        replays, unexplained = _match_all(matcher, stretches, starts, heights)
    return Alignment(
        forward=forward,
        backwards=matcher.anchors.backwards,
        replays=tuple(replays),
        unexplained=np.concatenate([*unexplained, candidates[:0]]),
    )


def _match_all(
    matcher: _Matcher, stretches: list[Int64], starts: Int64, heights: dict[bytes, int]
) -> tuple[list[Replay], list[Int64]]:
    """Replays of all stretches, in order of time, and what is left of each stretch."""
    calls, structure = matcher.calls, matcher.structure
    replays: list[Replay] = []
    unexplained: list[Int64] = []
    for stretch in stretches:
        engine = int(structure.engine[stretch[0]])
        step = int(np.searchsorted(starts, calls.start[engine], side="right")) - 1
        begin = int(starts[step]) if step >= 0 else 0
        found = matcher.match(stretch, engine, begin, heights)
        matched = np.concatenate([replay.again for replay in found] or [stretch[:0]])
        if 2 * len(matched) < len(stretch):
            unexplained.append(stretch)
            continue
        for replay in found:
            matcher.anchors.remember(replay.again, replay.original)
        replays.extend(found)
        unexplained.append(np.setdiff1d(stretch, matched, assume_unique=True))
    return replays, unexplained


def _crossings(
    matcher: _Matcher, stretches: list[Int64], replays: list[Replay]
) -> dict[bytes, int]:
    """How far below its expected end a stretch may reach; by operators, for those cut wrongly.

    Checkpointed calls nest or are disjoint. Replays that overlap in part show a layer that ran
    twice in one stretch, mistaken for itself and the equal layer before it.
    """
    spans = sorted(
        (int(places.min()), -int(places.max()), replay.engine)
        for replay in replays
        for places in (np.searchsorted(matcher.forward, replay.original),)
    )
    stretch_of = {int(matcher.structure.engine[stretch[0]]): stretch for stretch in stretches}
    heights: dict[bytes, int] = {}
    open_ends: list[int] = []
    for first, minus_last, engine in spans:
        last = -minus_last
        while open_ends and open_ends[-1] < first:
            open_ends.pop()
        crosses = open_ends and open_ends[-1] < last
        anchor = matcher.anchors.find(engine) if crosses else None
        if anchor is not None and not matcher.structure.checkpoint_node[engine]:
            code = matcher.code[stretch_of[engine]].tobytes()
            heights[code] = anchor.last - open_ends[-1] - 1
        open_ends.append(last)
    return heights


def _stretches(calls: Calls, structure: Structure, candidates: Int64) -> list[Int64]:
    """Candidates by the engine range they ran in, in order of time."""
    engines = structure.engine[candidates]
    order = np.lexsort((candidates, calls.start[engines]))
    rows = candidates[order]
    edges = np.flatnonzero(np.diff(structure.engine[rows])) + 1
    return [part for part in np.split(rows, edges) if len(part)]


class _Matcher:
    """What every stretch of one trace is matched with."""

    def __init__(
        self, calls: Calls, structure: Structure, work: Work, forward: Int64, neutral: Bool
    ) -> None:
        self.calls = calls
        self.structure = structure
        self.work = work
        self.forward = forward
        self.anchors = Anchors(calls, structure, forward)
        self.code = OperatorCodes(calls)
        self._sequence = ForwardSequence(self.code[forward])
        self._starts = calls.start[forward]
        self._neutral = neutral
        self._twins_before = _twins_before(calls, neutral)
        self._typical: dict[int, float] = {}
        self._brings_back = calls.matching(words.BRINGS_BACK)
        self._formula_ends = _have_unnumbered_formula(structure)
        self._one_thread = len(np.unique(calls.thread[forward])) <= 1

    def match(
        self, stretch: Int64, engine: int, begin: int, heights: dict[bytes, int]
    ) -> list[Replay]:
        """The replays that one stretch consists of, in order of time.

        Args:
            stretch: Rows of its candidates.
            engine: Row of its engine range.
            begin: Start of its step, ns.
            heights: How far below its expected end a stretch of these operators may reach,
                unless that explains less.
        """
        height = heights.get(self.code[stretch].tobytes())
        stretch = stretch[self._unpacking(stretch, engine) :]
        anchor = self.anchors.find(engine)
        lowest, highest = 0, len(self.forward)
        if self._one_thread:  # then forward operators stand in order of time
            times = begin, int(self.calls.start[engine])
            lowest, highest = np.searchsorted(self._starts, times).tolist()
        runs = self._runs(stretch, anchor, lowest, highest)
        if height is not None and anchor is not None:
            highest = max((run.stop for run in runs), default=highest)
            above = self._runs(stretch, anchor, max(lowest, anchor.last - height), highest)
            if _explained(above) >= _explained(runs):
                runs = above
        if not self._formula_ends[engine] and not self.structure.checkpoint_node[engine]:
            # Every operator of this node is numbered: gradients of gradients, where a formula
            # looks like a forward pass. Only long runs count.
            runs = [run for run in runs if run.length > SHORT_RUN]
        parts = passes_of(runs)
        if self.structure.checkpoint_node[engine]:
            # The node's own replay comes last, after that of an outer checkpoint, which runs
            # its function; a few operators outside that unpack the node's inputs.
            own = parts[-1:]
            parts = [part for part in parts[:-1] if not self._unpacks(stretch, part)] + own
        return [self._replay(stretch, engine, part) for part in parts]

    def _unpacking(self, stretch: Int64, engine: int) -> int:
        """How many operators at the beginning bring back what a checkpoint inside offloading saved.

        They look like those that took it away in the forward pass, but have no gradient.
        """
        if self.structure.checkpoint_node[engine]:
            return 0
        copies = self._brings_back[self.calls.name[stretch]] & (self.structure.number[stretch] < 0)
        others = np.flatnonzero(~copies)
        return int(others[0]) if len(others) else 0

    def _unpacks(self, stretch: Int64, part: list[Run]) -> bool:
        function = int(self.structure.function[stretch[part[0].start]])
        return function < 0 and _explained(part) < SHORT_RUN

    def _runs(self, stretch: Int64, anchor: Anchor | None, lowest: int, highest: int) -> list[Run]:
        wanted = self.code[stretch]
        runs: list[Run] = []
        end = len(wanted)
        if anchor is not None and anchor.first >= 0:
            # The checkpointed call's own replay ends the stretch and lies within the call.
            own = self._sequence.cut(wanted, end, anchor.first, anchor.last + 1, anchor.last)
            own = until_jump(own)
            runs.extend(own)
            end = min((run.start for run in own), default=end)
        last = anchor.last if anchor is not None else highest - 1
        ceiling = min(highest, last + len(wanted) + NEAR)
        runs.extend(self._sequence.cut(wanted, end, lowest, ceiling, last))
        return runs

    def _replay(self, stretch: Int64, engine: int, runs: list[Run]) -> Replay:
        again = np.concatenate([stretch[run.start : run.start + run.length] for run in runs])
        original = np.concatenate([self.forward[run.place : run.stop] for run in runs])
        functions = self.structure.function[again]
        inner_function = bool(np.count_nonzero(functions >= 0) * 2 > len(again))
        # Only a non-reentrant replay stops early, and not inside a function that it runs again.
        whole = inner_function or bool(self.structure.checkpoint_node[engine])
        return Replay(
            engine=engine,
            original=original,
            again=again,
            ran=self._ran(original, again, whole),
            inner_function=inner_function,
        )

    def _ran(self, original: Int64, again: Int64, whole: bool) -> Bool:
        """Which replayed operators really ran; see :class:`Replay`."""
        ran = self._twins(again) >= self._twins(original)
        if self.work.on_gpu:
            return np.asarray(
                ran & ((self.work.kernels[original] == 0) | (self.work.kernels[again] > 0))
            )
        if whole or self.calls.name[again[-1]] != self.calls.name[original[-1]]:
            return ran
        last, first_run = int(again[-1]), int(original[-1])
        inside, inside_first = self._operators_inside(last), self._operators_inside(first_run)
        if inside < inside_first:
            ran[-1] = False
        elif inside == inside_first == 0:
            duration = int(self.calls.end[last] - self.calls.start[last])
            ran[-1] &= 4 * duration >= self._typical_duration(original[-1:])
        return ran

    def _operators_inside(self, row: int) -> int:
        """A replay detaches, inside of its operators, what it recomputed: that does not count."""
        within = slice(row + 1, row + 1 + int(self.calls.size[row]))
        return int(np.count_nonzero(~self._neutral[within]))

    def _typical_duration(self, row: Int64) -> float:
        """Median of all first runs of equal operators: one alone may have been held up."""
        code = int(self.code[row][0])
        if code not in self._typical:
            equals = self.forward[self._sequence.codes == code]
            durations = self.calls.end[equals] - self.calls.start[equals]
            self._typical[code] = float(np.median(durations))
        return self._typical[code]

    def _twins(self, rows: Int64) -> Int32:
        """For each call: how many operators inside it stand directly in one of the same name."""
        before = self._twins_before
        twins: Int32 = before[rows + self.calls.size[rows] + 1] - before[rows + 1]
        return twins


def _have_unnumbered_formula(structure: Structure) -> Bool:
    """For each engine range: did its node run an operator without a sequence number?"""
    formula = (structure.role == Role.FORMULA) & (structure.number < 0)
    found = np.zeros(len(structure.role), np.bool_)
    found[structure.engine[formula & (structure.engine >= 0)]] = True
    return found


def _explained(runs: list[Run]) -> int:
    return sum(run.length for run in runs)


def _twins_before(calls: Calls, neutral: Bool) -> Int32:
    """Operators before each row, and before the end, that stand in one of the same name.

    A dispatch mode, which selective checkpointing uses, records each operator twice, one in
    the other (since torch 2.13 with a range between); one whose saved result is returned has
    no inner one. Bookkeeping differs between first run and replay and is left out.
    """
    mode = np.array([name == words.DISPATCH_MODE for name in calls.names], np.bool_)[calls.name]
    above = np.maximum(calls.parent, 0)
    beyond = np.flatnonzero(mode[above] & (calls.parent[above] >= 0))
    above[beyond] = calls.parent[above[beyond]]
    twin = (calls.parent >= 0) & (calls.name == calls.name[above]) & (calls.kind == Kind.OP)
    before = np.zeros(len(calls) + 1, np.int32)
    np.cumsum(twin & ~neutral, out=before[1:])
    return before
