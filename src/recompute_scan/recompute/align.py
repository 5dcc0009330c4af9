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
from recompute_scan.recompute.structure import Role, Structure
from recompute_scan.recompute.work import Work
from recompute_scan.trace.columns import Bool, Int64, Kind

# A run this short proves something only where it is expected to stand.
SHORT_RUN = 3
# How far, in operators, from its expected end a short run may stand.
NEAR = 8
# Going back within one stretch starts a second replay; it must explain more than it assumes.
_JUMP = 2.0
_PER_GAP = 0.01
# A replay ends at the operator that asked for it, but for a few behind it that save nothing:
# each operator beyond the expected end of a stretch costs as much as one that it explains.


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
    finder = _Finder(calls, structure, work, forward, neutral)
    stretches = _stretches(calls, structure, candidates)
    replays, unexplained = _match_all(finder, stretches, starts, {})
    if heights := _crossings(finder, stretches, replays):
        replays, unexplained = _match_all(finder, stretches, starts, heights)
    return Alignment(
        forward=forward,
        backwards=finder.backwards,
        replays=tuple(replays),
        unexplained=np.concatenate([*unexplained, candidates[:0]]),
    )


def _match_all(
    finder: _Finder, stretches: list[Int64], starts: Int64, heights: dict[bytes, int]
) -> tuple[list[Replay], list[Int64]]:
    """Replays of all stretches, in order of time, and what is left of each stretch."""
    calls, structure = finder.calls, finder.structure
    replays: list[Replay] = []
    unexplained: list[Int64] = []
    for stretch in stretches:
        engine = int(structure.engine[stretch[0]])
        step = int(np.searchsorted(starts, calls.start[engine], side="right")) - 1
        begin = int(starts[step]) if step >= 0 else 0
        found = finder.match(stretch, engine, begin, heights)
        matched = np.concatenate([replay.again for replay in found] or [stretch[:0]])
        if 2 * len(matched) < len(stretch):
            unexplained.append(stretch)
            continue
        finder.remember(found)
        replays.extend(found)
        unexplained.append(np.setdiff1d(stretch, matched, assume_unique=True))
    return replays, unexplained


def _crossings(finder: _Finder, stretches: list[Int64], replays: list[Replay]) -> dict[bytes, int]:
    """How far below its expected end a stretch may reach; by operators, for those cut wrongly.

    Checkpointed calls nest or are disjoint. Replays that overlap in part show a layer that ran
    twice in one stretch, mistaken for itself and the equal layer before it.
    """
    spans = sorted(
        (int(places.min()), -int(places.max()), replay.engine)
        for replay in replays
        for places in (np.searchsorted(finder.forward, replay.original),)
    )
    codes = {int(finder.structure.engine[s[0]]): finder.code[s].tobytes() for s in stretches}
    heights: dict[bytes, int] = {}
    open_ends: list[int] = []
    for first, minus_last, engine in spans:
        last = -minus_last
        while open_ends and open_ends[-1] < first:
            open_ends.pop()
        crosses = open_ends and open_ends[-1] < last
        anchor = finder.anchor(engine) if crosses else None
        if anchor is not None and not finder.structure.checkpoint_node[engine]:
            heights[codes[engine]] = anchor.last - open_ends[-1] - 1
        open_ends.append(last)
    return heights


def _stretches(calls: Calls, structure: Structure, candidates: Int64) -> list[Int64]:
    """Candidates by the engine range they ran in, in order of time."""
    engines = structure.engine[candidates]
    order = np.lexsort((candidates, calls.start[engines]))
    rows = candidates[order]
    edges = np.flatnonzero(np.diff(structure.engine[rows])) + 1
    return [part for part in np.split(rows, edges) if len(part)]


@dataclass(frozen=True)
class _Anchor:
    """Where a stretch is expected: positions in the forward sequence.

    ``first`` and ``last`` bound the checkpointed call; ``first`` is -1 where only the expected
    end is known.
    """

    first: int
    last: int


class _Finder:
    """The forward sequence, indexed, and what each candidate has been matched with so far."""

    def __init__(
        self, calls: Calls, structure: Structure, work: Work, forward: Int64, neutral: Bool
    ) -> None:
        self.calls = calls
        self.structure = structure
        self.work = work
        self.forward = forward
        self._twins = _twins(calls, neutral)
        self.code = calls.name.astype(np.int64) * (int(calls.dims.max(initial=0)) + 1) + calls.dims
        self.codes = self.code[forward]
        order = np.argsort(self.codes, kind="stable")
        self._sorted = self.codes[order]
        self._positions = order
        self._origin = np.full(len(calls), -1, np.int64)
        self._origin[forward] = forward
        self._formula_ends = self._has_unnumbered_formula()
        self._one_thread = len(np.unique(calls.thread[forward])) <= 1
        self._index_sequences()

    def remember(self, replays: list[Replay]) -> None:
        """Keep which forward operator each replayed one repeats, for stretches inside it."""
        for replay in replays:
            self._origin[replay.again] = replay.original

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
        anchor = self.anchor(engine)
        lowest = 0
        if self._one_thread:  # then forward operators stand in order of time
            lowest = int(np.searchsorted(self.calls.start[self.forward], begin))
        runs = self._runs(stretch, anchor, lowest)
        height = heights.get(self.code[stretch].tobytes())
        if height is not None and anchor is not None:
            highest = max((place + length for _, place, length in runs), default=None)
            above = self._runs(stretch, anchor, max(lowest, anchor.last - height), highest)
            if sum(run[2] for run in above) >= sum(run[2] for run in runs):
                runs = above
        if not self._formula_ends[engine] and not self.structure.checkpoint_node[engine]:
            # Every operator of this node is numbered: gradients of gradients, where a formula
            # looks like a forward pass. Only long runs count.
            runs = [run for run in runs if run[2] > SHORT_RUN]
        return [self._replay(stretch, engine, part) for part in _passes(runs)]

    def _runs(
        self, stretch: Int64, anchor: _Anchor | None, lowest: int, highest: int | None = None
    ) -> list[_Run]:
        wanted = self.code[stretch]
        runs: list[_Run] = []
        end = len(wanted)
        if anchor is not None and anchor.first >= 0:
            # The checkpointed call's own replay ends the stretch and lies within the call.
            own = self._cut(wanted, end, anchor.first, anchor.last + 1, anchor.last)
            own = _until_jump(own)
            runs.extend(own)
            end = min((run[0] for run in own), default=end)
        last = anchor.last if anchor is not None else len(self.codes) - 1
        ceiling = min(len(self.codes), last + len(wanted) + NEAR, highest or len(self.codes))
        runs.extend(self._cut(wanted, end, lowest, ceiling, last))
        return runs

    def _cut(self, wanted: Int64, end: int, low: int, high: int, expected: int) -> list[_Run]:
        """Cut ``wanted[:end]`` from its end into runs of the forward within [low, high)."""
        runs: list[_Run] = []
        cursor: int | None = None
        while end > 0:
            best = self._best(wanted, end, low, high, expected, cursor)
            if best is None:
                end -= 1
                continue
            position, length = best
            runs.append((end - length, position - length + 1, length))
            end -= length
            cursor = position - length + 1
            expected = cursor - 1
        return runs

    def _best(
        self, wanted: Int64, end: int, low: int, high: int, expected: int, cursor: int | None
    ) -> tuple[int, int] | None:
        code = wanted[end - 1]
        left, right = np.searchsorted(self._sorted, code), 0
        right = int(np.searchsorted(self._sorted, code, side="right"))
        places = self._positions[left:right]
        places = places[(places >= low) & (places < high)]
        best: tuple[float, int, int] | None = None
        for position in places[np.argsort(np.abs(places - expected), kind="stable")]:
            length = self._length(wanted, end, int(position), low)
            gap = abs(int(position) - expected)
            jumps = cursor is not None and position >= cursor
            if length < SHORT_RUN and length < end and (gap > NEAR or jumps):
                continue
            if length < SHORT_RUN and gap > NEAR:
                continue
            score = length - _PER_GAP * gap - (_JUMP if jumps else 0.0)
            if cursor is None and position > expected:
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

    def _replay(self, stretch: Int64, engine: int, runs: list[_Run]) -> Replay:
        again = np.concatenate([stretch[start : start + length] for start, _, length in runs])
        original = np.concatenate(
            [self.forward[position : position + length] for _, position, length in runs]
        )
        functions = self.structure.function[again]
        return Replay(
            engine=engine,
            original=original,
            again=again,
            ran=self._ran(original, again),
            inner_function=bool(np.count_nonzero(functions >= 0) * 2 > len(again)),
        )

    def _ran(self, original: Int64, again: Int64) -> Bool:
        """Which replayed operators really ran; see :class:`Replay`."""
        ran = self._twins[again] >= self._twins[original]
        if self.work.on_gpu:
            return ran & ((self.work.kernels[original] == 0) | (self.work.kernels[again] > 0))
        size, duration = self.calls.size, self.calls.duration
        last, first_run = int(again[-1]), int(original[-1])
        cut_inside = size[last] < size[first_run]
        nothing_inside = size[last] == size[first_run] == 0
        ran[-1] &= not (cut_inside or (nothing_inside and 4 * duration[last] < duration[first_run]))
        return ran

    # -- anchors -----------------------------------------------------------------------------

    def _index_sequences(self) -> None:
        calls, structure = self.calls, self.structure
        numbered = structure.number >= 0
        functions = (structure.role == Role.RANGE) & numbered & (structure.function >= 0)
        functions &= structure.function == np.arange(len(calls))
        outside = structure.engine < 0
        self._functions = np.flatnonzero(functions)
        rows = np.flatnonzero(numbered & outside & ((structure.role == Role.FORWARD) | functions))
        self._outer_rows = rows[np.argsort(structure.number[rows], kind="stable")]
        self._outer_numbers = structure.number[self._outer_rows]
        engines = structure.rows(Role.BACKWARD)
        parents = calls.parent[engines]
        nested = np.where(parents >= 0, structure.engine[parents], -1)
        self._enclosing = np.full(len(calls), -1, np.int64)
        self._enclosing[engines] = nested
        self.backwards = self._count_backwards(engines)

    def _count_backwards(self, engines: Int64) -> Int64:
        """For each forward operator: how often a node of its own, or of its checkpoint, ran."""
        calls, structure = self.calls, self.structure
        times = np.zeros(len(calls), np.int64)
        root = engines[(self._enclosing[engines] < 0) & (structure.number[engines] >= 0)]
        if len(self._outer_rows) and len(root):
            numbers, counts = np.unique(structure.number[root], return_counts=True)
            if len(np.unique(calls.thread[self._outer_rows])) > 1:
                counts = np.minimum(counts, 1)  # numbers of several threads repeat each other
            at = np.searchsorted(self._outer_numbers, numbers, side="right") - 1
            np.maximum.at(times, self._outer_rows[at[at >= 0]], counts[at >= 0])
        elif len(engines):
            # No sequence numbers in this trace: all that ran before a backward has one.
            before = calls.start[self.forward] < calls.start[engines].max()
            return before.astype(np.int64)
        outermost = self._outermost_function(structure.function[self.forward])
        return np.where(outermost >= 0, times[np.maximum(outermost, 0)], times[self.forward])

    def _outermost_function(self, function: Int64) -> Int64:
        outermost = function.copy()
        for _ in range(64):
            parents = np.where(outermost >= 0, self.calls.parent[outermost], -1)
            above = np.where(parents >= 0, self.structure.function[parents], -1)
            if not (above >= 0).any():
                break
            outermost = np.where(above >= 0, above, outermost)
        return outermost

    def anchor(self, engine: int) -> _Anchor | None:
        """Where the replays of an engine range are expected to end, and to begin if known."""
        calls, structure = self.calls, self.structure
        number = int(structure.number[engine])
        if number < 0:
            return None
        enclosing = int(self._enclosing[engine])
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
            if len(inside):
                return self._place(int(inside[np.argmax(structure.number[inside])]), engine)
        at = int(np.searchsorted(self._outer_numbers, number, side="right")) - 1
        return self._place(int(self._outer_rows[at]), engine) if at >= 0 else None

    def _place(self, row: int, engine: int) -> _Anchor | None:
        """Where the forward run of ``row`` stands: an operator, or a checkpoint function."""
        if self.structure.function[row] == row:
            inside = np.arange(row + 1, row + 1 + int(self.calls.size[row]))
            origins = self._origin[inside]
            origins = origins[origins >= 0]
            if not len(origins):
                return None
            places = np.searchsorted(self.forward, origins)
            whole = bool(self.structure.checkpoint_node[engine])
            return _Anchor(int(places.min()) if whole else -1, int(places.max()))
        origin = int(self._origin[row])
        return None if origin < 0 else _Anchor(-1, int(np.searchsorted(self.forward, origin)))

    def _has_unnumbered_formula(self) -> Bool:
        """For each engine range: did its node run an operator without a sequence number?"""
        calls, structure = self.calls, self.structure
        formula = (structure.role == Role.FORMULA) & (structure.number < 0)
        found = np.zeros(len(calls), np.bool_)
        found[structure.engine[formula & (structure.engine >= 0)]] = True
        return found


# Start in the stretch, start in the forward sequence, length.
_Run = tuple[int, int, int]


def _until_jump(runs: list[_Run]) -> list[_Run]:
    """The runs up to the first that goes back: those of one replay. Latest first, as cut."""
    kept: list[_Run] = []
    for run in runs:
        if kept and run[1] + run[2] > kept[-1][1]:
            break
        kept.append(run)
    return kept


def _passes(runs: list[_Run]) -> list[list[_Run]]:
    """Runs (latest first) grouped into single walks through the forward, in order of time."""
    passes: list[list[_Run]] = []
    for run in runs:
        if passes and run[1] + run[2] <= passes[-1][-1][1]:
            passes[-1].append(run)
        else:
            passes.append([run])
    return [walk[::-1] for walk in passes[::-1]]


def _twins(calls: Calls, neutral: Bool) -> Int64:
    """For each call: how many operators inside it stand directly in one of the same name.

    A dispatch mode, which selective checkpointing uses, records each operator twice, one in
    the other (since torch 2.13 with a range between); one whose saved result is returned has
    no inner one. Bookkeeping differs between first run and replay and is left out.
    """
    mode = np.array([name == words.DISPATCH_MODE for name in calls.names], np.bool_)[calls.name]
    above = np.where(calls.parent >= 0, calls.parent, 0)
    above = np.where(mode[above] & (calls.parent[above] >= 0), calls.parent[above], above)
    twin = (calls.parent >= 0) & (calls.name == calls.name[above]) & (calls.kind == Kind.OP)
    before = np.concatenate(([0], np.cumsum(twin & ~neutral)))
    rows = np.arange(len(calls))
    return np.asarray(before[rows + calls.size + 1] - before[rows + 1], np.int64)
