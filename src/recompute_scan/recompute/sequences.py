"""Operators of the backward pass matched with operators of the forward pass.

A node's operators are one sequence. The sequence is cut from its end into runs: operators in a row
that the forward pass has in the same row. A recompute goes through the forward pass from its first
operator to its last and may leave some out. Where the places stop rising, one recompute ends and
another begins.

Where layers are equal, a sequence can be one recompute of two layers or two recomputes of one.
Three facts decide, once every sequence has been read:

* sequences of the same operators come from checkpoints of the same kind. The first layer's can be
  read in one way only, and the others are read like it. So is a sequence that ends like it, where a
  checkpoint around all layers put its recompute before;
* checkpoints around one operator are recomputed from the outermost to the innermost, so no
  recompute in a sequence begins before the one that ran before it;
* checkpointed calls nest or are disjoint, so recomputes that overlap in part cannot both be right.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.numpy_tools import changes
from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.anchors import Anchor, Anchors
from recompute_scan.recompute.roles import OperatorCodes, Role, Structure
from recompute_scan.trace.calls import Calls
from recompute_scan.trace.columns import Bool, Int64, Ints

# A shorter run is evidence only near the place where it is expected.
SHORT_RUN = 3
# How far from that place, in operators, a short run may end.
NEAR = 8
# Cost of each operator that a recompute leaves out, such as a cast that autocast cached.
_PER_GAP = 0.5


class Run(Struct, frozen=True):
    """``length`` operators from ``start`` of a sequence, found at ``place`` in the forward pass.

    ``last``: the recompute ends with this run. The run after it belongs to another recompute.
    """

    start: int
    place: int
    length: int
    last: bool

    @property
    def stop(self) -> int:
        """The place behind the last operator."""
        return self.place + self.length


class ForwardSequence:
    """The operators of the forward pass, indexed for searching."""

    def __init__(self, codes: Int64) -> None:
        self.codes = codes
        self._places = self.codes.argsort(kind="stable")
        self._sorted = self.codes[self._places]

    def __len__(self) -> int:
        return len(self.codes)

    def cut(
        self,
        wanted: Int64,
        end: int,
        low: int,
        high: int,
        expected: int,
        begin: int = 0,
        behind: Iterable[Run] = (),
    ) -> list[Run]:
        """``wanted[begin:end]`` as runs of this sequence within [low, high), the last run first.

        Each run is the longest that ends where the next one begins. Among runs of equal length the
        nearest to its expected place is taken. Operators that fit nowhere are passed over.

        Args:
            wanted: Codes of the sequence.
            end: Behind the last operator to cut.
            low: First place allowed.
            high: Place behind the last allowed.
            expected: Where the last operator is expected.
            begin: The first operator to cut.
            behind: Runs already cut from the same sequence; the result begins with them.
        """
        runs = list(behind)
        while end > begin:
            best = self._best(wanted, begin, end, low, high, expected, runs)
            if best is None:
                end -= 1
                continue
            if best.last and runs:
                runs[-1:] = self._shared_out(wanted, best, runs[-1], runs[0].stop)
            else:
                runs.append(best)
            end = best.start
        return runs

    def _shared_out(self, wanted: Int64, run: Run, after: Run, stop: int) -> list[Run]:
        """Two recomputes, the later first. Operators that fit both go to the end of the earlier.

        The node that asked for both wants both to end at ``stop``.
        """
        room = min(after.length - 1, stop - run.stop)
        if run.start + run.length != after.start or room <= 0:
            return [after, run]
        fits = wanted[after.start : after.start + room] == self.codes[run.stop : run.stop + room]
        more = room if fits.all() else int(np.flatnonzero(~fits)[0])
        later = replace(
            after,
            start=after.start + more,
            place=after.place + more,
            length=after.length - more,
        )
        return [later, replace(run, length=run.length + more)]

    def _best(
        self,
        wanted: Int64,
        begin: int,
        end: int,
        low: int,
        high: int,
        expected: int,
        runs: list[Run],
    ) -> Run | None:
        after = runs[-1] if runs else None
        on = expected if after is None else after.place - 1
        # All recomputes of one sequence were asked for by one node, and end near it.
        again = expected if after is None else runs[0].stop - 1
        best: tuple[float, Run] | None = None
        for position in self._nearest(int(wanted[end - 1]), low, high, on):
            length = self._length(wanted, begin, end, position, low)
            if not length:
                continue
            last = after is None or position >= after.place
            jumps = last and after is not None
            gap = abs(position - (again if last else on))
            if length < SHORT_RUN and (gap > NEAR or (jumps and length < end - begin)):
                continue
            # A recompute ends at the operator that asked for it, or a few operators later that
            # save nothing: each operator of the distance costs as much as one that fits gains.
            score = length - (gap if last else _PER_GAP * gap)
            if best is None or score > best[0]:
                best = (score, Run(end - length, position - length + 1, length, last))
            if length == end - begin and not jumps:
                break  # explains the whole rest, and no nearer place does
        return None if best is None else best[1]

    def _nearest(self, code: int, low: int, high: int, place: int) -> Iterator[int]:
        """Places within [low, high) of operators with that code, nearest to ``place`` first."""
        if low <= place < high and self.codes[place] == code:
            yield place
        left, right = self._sorted.searchsorted(code), self._sorted.searchsorted(code, "right")
        places = self._places[left:right]
        places = places[slice(*places.searchsorted((low, high)))]
        nearest: list[int] = places[np.abs(places - place).argsort(kind="stable")].tolist()
        yield from nearest[bool(nearest and nearest[0] == place) :]

    def _length(self, wanted: Int64, begin: int, end: int, position: int, low: int) -> int:
        longest = min(end - begin, position - low + 1)
        differ = wanted[end - longest : end] != self.codes[position - longest + 1 : position + 1]
        breaks = np.flatnonzero(differ)
        return longest - 1 - int(breaks[-1]) if len(breaks) else longest


def until_jump(runs: list[Run]) -> list[Run]:
    """The runs of one recompute, the last of a sequence. Latest first, as cut."""
    return passes_of(runs)[-1][::-1] if runs else []


def passes_of(runs: list[Run]) -> list[list[Run]]:
    """Runs (latest first) grouped into single walks through the forward, in order of time."""
    passes: list[list[Run]] = []
    for run in runs:
        if run.last:
            passes.append([run])
        else:
            passes[-1].append(run)
    return [walk[::-1] for walk in passes[::-1]]


class Ending(Struct, frozen=True):
    """How far below its expected end a sequence may reach with its last ``count`` operators.

    ``longer``: so may any that ends with these operators.
    """

    count: int
    height: int
    longer: bool = False


class Endings(Struct, frozen=True):
    """Endings that are known, by the sequence (the bytes of its codes)."""

    known: dict[bytes, Ending]

    def of(self, operators: Int64) -> Ending | None:
        """The ending of this sequence, or of the longest known one that it ends with."""
        text = operators.tobytes() if self.known else b""
        if text in self.known:
            return self.known[text]
        ends = [end for end, known in self.known.items() if known.longer and text.endswith(end)]
        return self.known[max(ends, key=len)] if ends else None


class Reading(Struct, frozen=True):
    """How one sequence was read.

    Attributes:
        operators: Codes of its operators.
        expected: Place in the forward pass where its recomputes are expected to end.
        recomputes: First and last place of each, in order of time.
        asked: A node asked for a saved tensor; else a checkpoint function's node ran it.
    """

    operators: Int64
    expected: int
    recomputes: tuple[tuple[int, int], ...]
    asked: bool

    @property
    def key(self) -> bytes:
        """Equal for equal operators."""
        return self.operators.tobytes()

    @property
    def whole(self) -> Ending:
        """The ending that lets all of such a sequence reach as far down as this one."""
        return Ending(len(self.operators), self.expected - min(self.begins))

    @property
    def begins(self) -> list[int]:
        """First place of each recompute, in order of time."""
        return [first for first, _ in self.recomputes]

    @property
    def in_order(self) -> bool:
        """Does every recompute begin at or behind the beginning of the one before?"""
        return self.begins == sorted(self.begins)


def correct(endings: Endings, readings: list[Reading]) -> Endings:
    """Further endings, found by comparing all readings.

    Only the first fact that some reading violates counts: mending it can mend the others.
    """
    for find in (_by_likeness, _by_order, _by_crossings):
        found = find(readings)
        if find is _by_likeness:
            found |= {k: e for k, e in _by_longer(readings).items() if k not in endings.known}
        new = {key: ending for key, ending in found.items() if endings.known.get(key) != ending}
        if new:
            return Endings(endings.known | new)
    return endings


def _surest(readings: Iterable[Reading]) -> dict[bytes, Reading]:
    """For each kind of sequence the reading with most recomputes."""
    surest: dict[bytes, Reading] = {}
    for reading in readings:
        known = surest.get(reading.key)
        if reading.in_order and (known is None or len(reading.recomputes) > len(known.recomputes)):
            surest[reading.key] = reading
    return surest


def _by_likeness(readings: list[Reading]) -> dict[bytes, Ending]:
    surest = _surest(readings)
    return {
        reading.key: surest[reading.key].whole
        for reading in readings
        if reading.key in surest and len(reading.recomputes) < len(surest[reading.key].recomputes)
    }


def _by_longer(readings: list[Reading]) -> dict[bytes, Ending]:
    keys = {reading.key for reading in readings}
    return {
        key: replace(reading.whole, longer=True)
        for key, reading in _surest(readings).items()
        if len(reading.recomputes) > 1
        and any(len(other) > len(key) and other.endswith(key) for other in keys)
    }


def _by_order(readings: Iterable[Reading]) -> dict[bytes, Ending]:
    endings = {}
    for reading in readings:
        count = 0
        for at in reversed(range(1, len(reading.recomputes))):
            first, last = reading.recomputes[at]
            floor = max(reading.begins[:at])
            if first < floor:
                count += last - floor + 1
                endings[reading.key] = Ending(count, reading.expected - floor)
                break
            count += last - first + 1
    return endings


def _by_crossings(readings: Iterable[Reading]) -> dict[bytes, Ending]:
    spans = [(first, last, reading) for reading in readings for first, last in reading.recomputes]
    endings: dict[bytes, Ending] = {}
    open_ends: list[int] = []
    for first, last, reading in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] < first:
            open_ends.pop()
        # A few operators fit the end of one recompute and the beginning of the next.
        if reading.asked and open_ends and open_ends[-1] + SHORT_RUN < last:
            height = reading.expected - open_ends[-1] - 1
            endings[reading.key] = Ending(len(reading.operators), height)
        open_ends.append(last)
    return {key: ending for key, ending in endings.items() if ending.height >= 0}


class Recompute(Struct, frozen=True):
    """Forward operators in order, run again.

    Attributes:
        engine: Row of the engine range in which it ran.
        original: Rows of the forward operators, in order.
        again: Rows of the same operators' second run; same length.
        ran: Whether each really ran. Where early stop cuts a recompute short, its last operator
            is entered but does no work; selective checkpointing returns saved results.
        inner_function: It ran inside a checkpoint function's forward: an outer checkpoint
            re-running a reentrant inner one.
        by_design: A function or the model did it, for another reason than a checkpoint.
        piece: It is a further shard of operators that ran whole, and no separate run.
    """

    engine: int
    original: Int64
    again: Int64
    ran: Bool
    inner_function: bool
    by_design: bool = False
    piece: bool = False


class SequenceMatch(Struct, frozen=True):
    """A recompute before it is known which operators really ran; see :class:`Recompute`."""

    engine: int
    original: Int64
    again: Int64
    inner_function: bool
    role: int
    piece: bool


class NodeSequence(Struct, frozen=True):
    """Operators that one node's engine range ran and that can be a recompute.

    Attributes:
        engine: Row of the engine range.
        rows: Rows of the operators.
        codes: Their codes.
        function: For each: the innermost checkpoint function in which it ran, -1 for none.
        lowest: First place of the forward pass that they may repeat.
        highest: Place behind the last.
        role: The :class:`Role` of all of them.
    """

    engine: int
    rows: Int64
    codes: Int64
    function: Ints
    lowest: int
    highest: int
    role: int


class Matcher:
    """Matches the sequences of one trace with its forward pass.

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
        code = self._code = OperatorCodes(calls)
        self._sequence = ForwardSequence(code[forward])
        self._one_thread = len(np.unique(calls.thread[forward])) <= 1
        self.sequences = self._list_sequences(candidates, starts, code)
        engines = np.array([sequence.engine for sequence in self.sequences], np.int64)
        self.anchors = Anchors(calls, structure, forward, engines)

    def _list_sequences(
        self, candidates: Int64, starts: Int64, code: OperatorCodes
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
        ends = np.append(begins[1:], len(rows))
        return [
            NodeSequence(
                engine=node,
                rows=rows[begin:end],
                codes=codes[begin:end],
                function=function[begin:end],
                lowest=low,
                highest=high,
                role=what,
            )
            for node, begin, end, low, high, what in zip(
                *(a.tolist() for a in (engines, begins, ends, lowest, highest, role[begins])),
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

    def match(self, node: NodeSequence, endings: Endings) -> list[SequenceMatch]:
        """The recomputes that one sequence consists of, in order of time.

        Args:
            node: The sequence.
            endings: The known endings. One counts unless fewer operators fit with it.
        """
        engine, wanted = node.engine, node.codes
        ending = endings.of(wanted)
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
        runs = self._runs(node, anchor, ending)
        if ending is not None and _explained(runs) < len(wanted):
            runs = max(runs, self._runs(node, anchor, None), key=_explained)
        parts = passes_of(runs)
        if checkpoint_node:
            # The node's recompute of its function comes last. Before it, an outer checkpoint can
            # have run the function, and a few operators the unpacking of the node's inputs.
            own = parts[-1:]
            parts = [part for part in parts[:-1] if not _unpacks(node, part)] + own
        return [self._matched(node, part) for part in parts]

    def _goes_in_parts(self, engine: int) -> bool:
        name = vocabulary.function_of(self._calls.names[self._calls.name[engine]])
        return name in self.structure.functions.in_parts

    def _once_each(self, node: NodeSequence, anchor: Anchor) -> list[SequenceMatch]:
        """The operators that a function ran again part by part, in any order, each once.

        Empty where its node ran more operators of a kind than its call, except a whole number of
        shards of each.
        """
        codes = self._sequence.codes[anchor.first : anchor.last + 1]
        wanted = node.codes
        places = _turn_by_turn(wanted, codes)
        if places is None:
            # Its gradient may go through other parts than its call, of other shapes.
            names = self._code.names(wanted), self._code.names(codes)
            places = _turn_by_turn(*names, shards=True)
        if places is None:
            return []
        places += anchor.first
        cuts = [0, *(np.flatnonzero(places[1:] < places[:-1]) + 1).tolist(), len(places)]
        return [
            SequenceMatch(
                engine=node.engine,
                original=self.forward[places[begin:end]],
                again=node.rows[begin:end],
                inner_function=False,
                role=node.role,
                piece=2 * np.isin(places[begin:end], places[:begin]).sum() > end - begin,
            )
            for begin, end in itertools.pairwise(cuts)
        ]

    def _runs(self, node: NodeSequence, anchor: Anchor | None, ending: Ending | None) -> list[Run]:
        """Runs of a sequence, the last first."""
        wanted, lowest, highest = node.codes, node.lowest, node.highest
        own: list[Run] = []
        known: list[Run] = []
        end = len(wanted)
        last = anchor.last if anchor is not None else highest - 1
        if anchor is not None and anchor.first >= 0:
            # The checkpointed call's recompute ends the sequence and lies within the call.
            own = until_jump(self._sequence.cut(wanted, end, anchor.first, last + 1, last))
            end = min((run.start for run in own), default=end)
        if anchor is not None and ending is not None:
            ceiling = min(highest, last + ending.count + NEAR)
            floor = max(lowest, last - ending.height)
            begin = max(0, len(wanted) - ending.count)
            known = self._sequence.cut(wanted, end, floor, ceiling, last, begin)
            end = min(begin, end)
        ceiling = min(highest, last + len(wanted) + NEAR)
        return own + self._sequence.cut(wanted, end, lowest, ceiling, last, behind=known)

    def _matched(self, node: NodeSequence, runs: list[Run]) -> SequenceMatch:
        parts = [slice(run.start, run.start + run.length) for run in runs]
        functions = np.concatenate([node.function[part] for part in parts])
        return SequenceMatch(
            engine=node.engine,
            role=node.role,
            piece=False,
            original=np.concatenate([self.forward[run.place : run.stop] for run in runs]),
            again=np.concatenate([node.rows[part] for part in parts]),
            inner_function=bool(np.count_nonzero(functions >= 0) * 2 > len(functions)),
        )


def _turn_by_turn(wanted: Int64, codes: Int64, *, shards: bool = False) -> Int64 | None:
    """Place of each of ``wanted`` in ``codes``, the n-th of a kind as the n-th; or ``None``.

    With ``shards`` the same again for each further shard.
    """
    places = np.full(len(wanted), -1, np.int64)
    for code in np.unique(wanted).tolist():
        here, there = np.flatnonzero(wanted == code), np.flatnonzero(codes == code)
        if len(here) > len(there) and (not shards or not len(there) or len(here) % len(there)):
            return None
        places[here] = np.resize(there, len(here))
    return places


def _unpacks(node: NodeSequence, part: list[Run]) -> bool:
    return bool(node.function[part[0].start] < 0) and _explained(part) < SHORT_RUN


def _explained(runs: list[Run]) -> int:
    return sum(run.length for run in runs)
