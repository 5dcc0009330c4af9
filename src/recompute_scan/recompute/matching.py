"""One sequence at a time: which parts of the forward pass the operators of one node repeat.

Where checkpointed calls begin and end in the trace bounds what may belong together.
"""

from __future__ import annotations

import itertools

import numpy as np
from msgspec import Struct

from recompute_scan.arrays import changes
from recompute_scan.model import Calls
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.anchors import Anchor, Anchors, Boundaries
from recompute_scan.recompute.readings import Ending, Endings
from recompute_scan.recompute.roles import OperatorCodes, Role, Structure
from recompute_scan.recompute.runs import (
    NEAR,
    SHORT_RUN,
    ForwardSequence,
    Run,
    Sequence,
    passes_of,
    until_jump,
)
from recompute_scan.trace.columns import Bool, Int64, Ints


class Recompute(Struct, frozen=True):
    """One sequence of the forward pass, run again.

    Attributes:
        engine: Row of the engine range in which it ran.
        original: Rows of the forward operators, in order.
        again: Rows of the same operators' second run; same length.
        ran: Whether each really ran. Where early stop cuts a recompute short, its last operator
            is entered but does no work; selective checkpointing returns saved results.
        inner_function: It ran inside a checkpoint function's forward: an outer checkpoint
            re-running a reentrant inner one.
        by_design: A function or a model did it for reasons of its own, and no checkpoint.
    """

    engine: int
    original: Int64
    again: Int64
    ran: Bool
    inner_function: bool
    by_design: bool = False


class SequenceMatch(Struct, frozen=True):
    """A recompute of which is not known yet what of it really ran; see :class:`Recompute`."""

    engine: int
    original: Int64
    again: Int64
    inner_function: bool
    role: int


class NodeSequence(Struct, frozen=True):
    """What one node's engine range ran where a recompute can stand.

    Attributes:
        engine: Row of the engine range.
        rows: Rows of the operators.
        operators: The operators.
        unpacking: How many at the beginning bring back what a checkpoint inside offloading saved.
        lowest: First place of the forward pass that they may repeat.
        highest: Place behind the last.
        role: The :class:`Role` of all of them.
    """

    engine: int
    rows: Int64
    operators: Sequence
    unpacking: int
    lowest: int
    highest: int
    role: int

    def unpacked(self) -> tuple[Int64, Sequence]:
        """Rows and operators behind those that bring back."""
        skipped, operators = self.unpacking, self.operators
        if not skipped:
            return self.rows, operators
        crossed = operators.crossed[skipped:].copy()
        crossed[:1] += operators.crossed[:skipped].sum()
        kept = Sequence(operators.codes[skipped:], crossed, operators.function[skipped:])
        return self.rows[skipped:], kept


class Matcher:
    """What every sequence of one trace is matched with.

    Args:
        calls: The trace's calls.
        structure: Their roles.
        forward: Rows of the operators of the forward pass.
        candidates: Rows of the operators that could be recomputes.
        starts: Start of each step in ns, ascending.

    Attributes:
        structure: The roles.
        forward: Those rows.
        sequences: The candidates of each node, in order of time.
        anchors: Where each of them is expected.
    """

    def __init__(
        self, calls: Calls, structure: Structure, forward: Int64, candidates: Int64, starts: Int64
    ) -> None:
        self.forward = forward
        self._calls = calls
        self.structure = structure
        boundaries = Boundaries(calls, structure)
        code = OperatorCodes(calls)
        self._sequence = ForwardSequence(
            Sequence(
                code[forward],
                boundaries.before(forward, np.full(len(forward), -1, np.int64)),
                structure.function[forward],
            )
        )
        self._one_thread = len(np.unique(calls.thread[forward])) <= 1
        self.sequences = self._list_sequences(candidates, starts, code, boundaries)
        engines = np.array([sequence.engine for sequence in self.sequences], np.int64)
        self.anchors = Anchors(calls, structure, forward, engines)

    def _list_sequences(
        self, candidates: Int64, starts: Int64, code: OperatorCodes, boundaries: Boundaries
    ) -> list[NodeSequence]:
        """Candidates by the engine range they ran in, in order of time."""
        if not len(candidates):
            return []
        calls, structure = self._calls, self.structure
        role = structure.role[candidates]
        order = np.lexsort((candidates, role, calls.start[structure.engine[candidates]]))
        rows, role = candidates[order], role[order]
        engine: Int64 = structure.engine[rows].astype(np.int64)
        begins = np.flatnonzero(changes(engine, role))
        engines = engine[begins]
        lowest, highest = self._bounds(engines, starts)
        codes, function = code[rows], structure.function[rows]
        crossed = boundaries.before(rows, engine)
        unpacking = self._unpacking(rows, begins, engines)
        ends = np.append(begins[1:], len(rows))
        return [
            NodeSequence(
                engine=node,
                rows=rows[begin:end],
                operators=Sequence(codes[begin:end], crossed[begin:end], function[begin:end]),
                unpacking=skipped,
                lowest=low,
                highest=high,
                role=what,
            )
            for node, begin, end, skipped, low, high, what in zip(
                *(
                    a.tolist()
                    for a in (engines, begins, ends, unpacking, lowest, highest, role[begins])
                ),
                strict=True,
            )
        ]

    def _bounds(self, engines: Int64, starts: Int64) -> tuple[Int64, Int64]:
        """Places of the forward pass between the start of each engine range's step and its own."""
        lowest = np.zeros(len(engines), np.int64)
        if not self._one_thread:
            return lowest, lowest + len(self.forward)
        # Forward operators are in order of time.
        times = self._calls.start[self.forward]
        own = self._calls.start[engines]
        begin = np.concatenate(([0], starts))[starts.searchsorted(own, side="right")]
        return times.searchsorted(begin), times.searchsorted(own)

    def _unpacking(self, rows: Int64, begins: Int64, engines: Int64) -> Int64:
        """How many operators at the beginning of each sequence bring back what was offloaded.

        They look like those that took it away in the forward pass, but have no gradient.
        """
        structure = self.structure
        brings_back = self._calls.matching(words.BRINGS_BACK)[self._calls.name[rows]]
        others = np.flatnonzero(~(brings_back & (structure.number[rows] < 0)))
        # A sequence of nothing else is not cut at all.
        first = np.append(others, len(rows))[others.searchsorted(begins)]
        alone = first >= np.append(begins[1:], len(rows))
        return np.where(alone | structure.checkpoint_node[engines], 0, first - begins)

    def match(self, node: NodeSequence, endings: Endings) -> list[SequenceMatch]:
        """The recomputes that one sequence consists of, in order of time.

        Args:
            node: The sequence.
            endings: What is known of some; it counts unless it explains less.
        """
        engine = node.engine
        ending = endings.of(node.operators.codes)
        sequence, wanted = node.unpacked()
        anchor = self.anchors.find(engine)
        checkpoint_node = bool(self.structure.checkpoint_node[engine])
        if checkpoint_node and self._goes_in_parts(engine):
            if node.role == Role.BY_DESIGN and anchor is not None and anchor.first >= 0:
                whole = self._once_each(node, anchor)
                if whole:
                    return whole
            elif node.role == Role.RECOMPUTE and anchor is not None:
                # An outer checkpoint's, asked for by the function's node.
                checkpoint_node, anchor = False, Anchor(-1, anchor.last)
        runs: list[Run] = []
        for floor, known in self._ways(engine, anchor, node.lowest, ending):
            found = self._runs(wanted, anchor, floor, node.highest, known)
            if _explained(found) > _explained(runs):
                runs = found
            if _explained(runs) == len(wanted):
                break
        parts = passes_of(runs)
        if checkpoint_node:
            # The node's own recompute comes last, after that of an outer checkpoint, which runs
            # its function; a few operators outside that unpack the node's inputs.
            own = parts[-1:]
            parts = [part for part in parts[:-1] if not _unpacks(wanted, part)] + own
        return [self._matched(node, sequence, wanted, part) for part in parts]

    def _goes_in_parts(self, engine: int) -> bool:
        name = words.function_of(self._calls.names[self._calls.name[engine]])
        return name in self.structure.functions.in_parts

    def _once_each(self, node: NodeSequence, anchor: Anchor) -> list[SequenceMatch]:
        """What a function ran again part by part, in any order: each of its operators once.

        None where its node ran more of a kind than its call.
        """
        codes = self._sequence.codes[anchor.first : anchor.last + 1]
        wanted = node.operators.codes
        places = np.full(len(wanted), -1, np.int64)
        for code in np.unique(wanted).tolist():
            here, there = np.flatnonzero(wanted == code), np.flatnonzero(codes == code)
            if len(here) > len(there):
                return []
            places[here] = anchor.first + there[: len(here)]
        cuts = [0, *(np.flatnonzero(places[1:] < places[:-1]) + 1).tolist(), len(places)]
        return [
            SequenceMatch(
                engine=node.engine,
                original=self.forward[places[begin:end]],
                again=node.rows[begin:end],
                inner_function=False,
                role=node.role,
            )
            for begin, end in itertools.pairwise(cuts)
        ]

    def _ways(
        self, engine: int, anchor: Anchor | None, lowest: int, ending: Ending | None
    ) -> list[tuple[int, Ending | None]]:
        """How far down a sequence may reach, and its ending; what comes later must explain more."""
        if anchor is None:
            return [(lowest, None)]
        ways: list[tuple[int, Ending | None]] = [(lowest, None)]
        if self._one_thread and (floor := self.anchors.still_open(anchor.last, engine)) > lowest:
            ways.insert(0, (floor, None))
        if ending is not None:
            ways.insert(0, (ways[0][0], ending))
        return ways

    def _runs(
        self,
        wanted: Sequence,
        anchor: Anchor | None,
        lowest: int,
        highest: int,
        ending: Ending | None,
    ) -> list[Run]:
        own: list[Run] = []
        known: list[Run] = []
        end = len(wanted)
        last = anchor.last if anchor is not None else highest - 1
        if anchor is not None and anchor.first >= 0:
            # The checkpointed call's own recompute ends the sequence and lies within the call.
            own = until_jump(self._sequence.cut(wanted, end, anchor.first, last + 1, last))
            end = min((run.start for run in own), default=end)
        if ending is not None:
            ceiling = min(highest, last + ending.count + NEAR)
            floor = max(lowest, last - ending.height)
            begin = max(0, len(wanted) - ending.count)
            known = self._sequence.cut(wanted, end, floor, ceiling, last, begin)
            end = min(begin, end)
        ceiling = min(highest, last + len(wanted) + NEAR)
        return own + self._sequence.cut(wanted, end, lowest, ceiling, last, behind=known)

    def _matched(
        self, node: NodeSequence, rows: Int64, wanted: Sequence, runs: list[Run]
    ) -> SequenceMatch:
        parts = [slice(run.start, run.start + run.length) for run in runs]
        functions = _joined([wanted.function[part] for part in parts])
        return SequenceMatch(
            engine=node.engine,
            role=node.role,
            original=_joined([self.forward[run.place : run.stop] for run in runs]),
            again=_joined([rows[part] for part in parts]),
            inner_function=bool(np.count_nonzero(functions >= 0) * 2 > len(functions)),
        )


def _joined(parts: list[Ints]) -> Ints:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _unpacks(wanted: Sequence, part: list[Run]) -> bool:
    return bool(wanted.function[part[0].start] < 0) and _explained(part) < SHORT_RUN


def _explained(runs: list[Run]) -> int:
    return sum(run.length for run in runs)
