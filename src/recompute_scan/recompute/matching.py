"""One sequence at a time: which parts of the forward pass the operators of one node repeat.

Where checkpointed calls begin and end in the trace bounds what may belong together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recompute_scan.model import Calls
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.anchors import Anchor, Anchors
from recompute_scan.recompute.readings import Ending, Endings
from recompute_scan.recompute.runs import (
    NEAR,
    SHORT_RUN,
    ForwardSequence,
    Run,
    Sequence,
    passes_of,
    until_jump,
)
from recompute_scan.recompute.structure import OperatorCodes, Role, Structure
from recompute_scan.recompute.work import Ran, Work
from recompute_scan.trace.columns import Bool, Int64


class Boundaries:
    """Begins and ends of checkpoint functions, and what torch's other variant leaves of its begin.

    The non-reentrant checkpoint leaves an operator from torch 2.1 to 2.12; before and since it
    leaves nothing.
    """

    def __init__(self, calls: Calls, structure: Structure) -> None:
        saver = np.array([name == words.INPUT_SAVER for name in calls.names], np.bool_)
        operator = np.isin(structure.role, (Role.FORWARD, Role.CANDIDATE))
        savers = np.flatnonzero(saver[calls.name] & operator)
        functions = np.flatnonzero(structure.function == np.arange(len(calls)))
        rows = np.concatenate([savers, functions, functions + calls.size[functions] + 1])
        engine = structure.engine[np.concatenate([savers, functions, functions])]
        order = np.lexsort((rows, engine))
        self._rows, self._engine = rows[order], engine[order]

    def before(self, operators: Int64, engine: int = -1) -> Int64:
        """How many lie between each operator and the one before it.

        Args:
            operators: Rows, ascending.
            engine: The engine range that they ran in; -1 for the forward pass.
        """
        first, last = self._engine.searchsorted((engine, engine + 1))
        passed = self._rows[first:last].searchsorted(operators, side="right")
        crossed: Int64 = passed.copy()
        crossed[1:] -= passed[:-1]
        return crossed


@dataclass(frozen=True)
class Recompute:
    """One sequence of the forward pass, run again.

    Attributes:
        engine: Row of the engine range in which it ran.
        original: Rows of the forward operators, in order.
        again: Rows of the same operators' second run; same length.
        ran: Whether each really ran. Where early stop cuts a recompute short, its last operator
            is entered but does no work; selective checkpointing returns saved results.
        inner_function: It ran inside a checkpoint function's forward: an outer checkpoint
            re-running a reentrant inner one.
    """

    engine: int
    original: Int64
    again: Int64
    ran: Bool
    inner_function: bool


class Matcher:
    """What every sequence of one trace is matched with."""

    def __init__(
        self, calls: Calls, structure: Structure, work: Work, forward: Int64, neutral: Bool
    ) -> None:
        self.calls = calls
        self.structure = structure
        self.forward = forward
        self.anchors = Anchors(calls, structure, forward)
        self.code = OperatorCodes(calls)
        self._boundaries = Boundaries(calls, structure)
        self._sequence = ForwardSequence(
            Sequence(
                self.code[forward], self._boundaries.before(forward), structure.function[forward]
            )
        )
        self._starts = calls.start[forward]
        self._ran = Ran(calls, work, forward, neutral)
        self._brings_back = calls.matching(words.BRINGS_BACK)
        self._formula_ends = _have_unnumbered_formula(structure)
        self._one_thread = len(np.unique(calls.thread[forward])) <= 1

    def match(self, sequence: Int64, engine: int, begin: int, endings: Endings) -> list[Recompute]:
        """The recomputes that one sequence consists of, in order of time.

        Args:
            sequence: Rows of its candidates.
            engine: Row of its engine range.
            begin: Start of its step, ns.
            endings: What is known of some; it counts unless it explains less.
        """
        ending = endings.of(self.code[sequence])
        sequence = sequence[self._unpacking(sequence, engine) :]
        anchor = self.anchors.find(engine)
        lowest, highest = 0, len(self.forward)
        if self._one_thread:  # then forward operators are in order of time
            times = begin, int(self.calls.start[engine])
            lowest, highest = self._starts.searchsorted(times).tolist()
        wanted = Sequence(
            self.code[sequence],
            self._boundaries.before(sequence, engine),
            self.structure.function[sequence],
        )
        runs: list[Run] = []
        for floor, known in self._ways(engine, anchor, lowest, ending):
            found = self._runs(wanted, anchor, floor, highest, known)
            if _explained(found) > _explained(runs):
                runs = found
            if _explained(runs) == len(sequence):
                break
        parts = passes_of(runs)
        if not self._formula_ends[engine] and not self.structure.checkpoint_node[engine]:
            # Every operator of this node is numbered: gradients of gradients, where a formula
            # looks like a forward pass. Only long runs count.
            parts = [[run for run in part if run.length > SHORT_RUN] for part in parts]
            parts = [part for part in parts if part]
        if self.structure.checkpoint_node[engine]:
            # The node's own recompute comes last, after that of an outer checkpoint, which runs
            # its function; a few operators outside that unpack the node's inputs.
            own = parts[-1:]
            parts = [part for part in parts[:-1] if not self._unpacks(sequence, part)] + own
        return [self._recompute(sequence, engine, part) for part in parts]

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

    def _unpacking(self, sequence: Int64, engine: int) -> int:
        """How many operators at the beginning bring back what a checkpoint inside offloading saved.

        They look like those that took it away in the forward pass, but have no gradient.
        """
        if self.structure.checkpoint_node[engine]:
            return 0
        copies = self._brings_back[self.calls.name[sequence]] & (
            self.structure.number[sequence] < 0
        )
        others = np.flatnonzero(~copies)
        return int(others[0]) if len(others) else 0

    def _unpacks(self, sequence: Int64, part: list[Run]) -> bool:
        function = int(self.structure.function[sequence[part[0].start]])
        return function < 0 and _explained(part) < SHORT_RUN

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

    def _recompute(self, sequence: Int64, engine: int, runs: list[Run]) -> Recompute:
        again = np.concatenate([sequence[run.start : run.start + run.length] for run in runs])
        original = np.concatenate([self.forward[run.place : run.stop] for run in runs])
        functions = self.structure.function[again]
        inner_function = bool(np.count_nonzero(functions >= 0) * 2 > len(again))
        # Only a non-reentrant recompute stops early, and not inside a function that it runs again.
        whole = inner_function or bool(self.structure.checkpoint_node[engine])
        return Recompute(
            engine=engine,
            original=original,
            again=again,
            ran=self._ran.of(original, again, whole),
            inner_function=inner_function,
        )


def _have_unnumbered_formula(structure: Structure) -> Bool:
    """For each engine range: did its node run an operator without a sequence number?"""
    formula = (structure.role == Role.FORMULA) & (structure.number < 0)
    found = np.zeros(len(structure.role), np.bool_)
    found[structure.engine[formula & (structure.engine >= 0)]] = True
    return found


def _explained(runs: list[Run]) -> int:
    return sum(run.length for run in runs)
