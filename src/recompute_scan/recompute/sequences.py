"""Operators of the backward pass matched with those of the forward pass.

What one node ran is a sequence, cut into runs that stand just so in the forward pass. A recompute
walks through the forward pass from its first operator to its last. It may leave some out, but it
crosses every boundary of a checkpointed call that the first run crossed on the way: where the
forward pass crossed one and the sequence did not, one recompute ends and another begins. (The other
way about proves nothing: within a reentrant checkpoint, code that checkpoints only where gradients
are on does so in the recompute alone.)

Where layers are equal, a sequence alone can be one recompute of two layers or two recomputes of
one. Four facts tell, once every sequence has been read:

* sequences of the same operators were made by checkpoints of the same kind. What is the first
  of its layers can be read in one way alone, and the others are read likewise; so is what ends
  like it, where a further checkpoint around all layers put its own recompute before;
* checkpoints around one operator are recomputed from the outermost to the innermost, so none of a
  sequence's recomputes begins before the one that ran before it;
* an operator whose results a recompute did not keep lies in a further checkpoint within, which has
  to recompute it again later;
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
from recompute_scan.recompute.anchors import Anchor, Anchors, Boundaries
from recompute_scan.recompute.roles import OperatorCodes, Role, Structure
from recompute_scan.trace.calls import Calls
from recompute_scan.trace.columns import Bool, Int64, Ints

# A run this short proves something only where it is expected to stand.
SHORT_RUN = 3
# How far, in operators, from its expected end a short run may stand.
NEAR = 8
# Going back within one sequence starts a second recompute; it must explain more than it assumes.
_JUMP = 2.0
# What a recompute leaves out, such as casts that autocast has cached, are single operators.
_PER_GAP = 0.5


class Sequence(Struct, frozen=True):
    """Operators in the order in which they ran, one entry each.

    Attributes:
        codes: Equal for operators of equal name, shapes and types.
        crossed: How many boundaries of checkpointed calls lie behind the operator before.
        function: The innermost checkpoint function in which it ran, -1 for none.
    """

    codes: Int64
    crossed: Int64
    function: Ints

    def __len__(self) -> int:
        return len(self.codes)


class Run(Struct, frozen=True):
    """``length`` operators from ``start`` of a sequence, found at ``place`` in the forward pass.

    ``last`` where its recompute ends with it: the run after it, if any, belongs to another.
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

    def __init__(self, operators: Sequence) -> None:
        self.codes = operators.codes
        self._crossed = operators.crossed
        self._places = self.codes.argsort(kind="stable")
        self._sorted = self.codes[self._places]

    def __len__(self) -> int:
        return len(self.codes)

    def cut(
        self,
        wanted: Sequence,
        end: int,
        low: int,
        high: int,
        expected: int,
        begin: int = 0,
        behind: Iterable[Run] = (),
    ) -> list[Run]:
        """``wanted[begin:end]`` as runs of this sequence within [low, high), the last run first.

        Each run is the longest that ends where the one before it began; of equally long ones
        that nearest to where it is expected. What fits nowhere is passed over.

        Args:
            wanted: The sequence.
            end: Behind the last operator to cut.
            low: First place allowed.
            high: Place behind the last allowed.
            expected: Where the last operator is expected.
            begin: The first operator to cut.
            behind: Runs that have been cut from the same sequence; they are part of the answer.
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

    def _shared_out(self, wanted: Sequence, run: Run, after: Run, stop: int) -> list[Run]:
        """Two recomputes, the later first; what could be of either goes to the end of the former.

        Both end where the node that asked for them wants them to: ``stop``.
        """
        room = min(after.length - 1, stop - run.stop)
        if run.start + run.length != after.start or room <= 0:
            return [after, run]
        here, there = slice(after.start, after.start + room), slice(run.stop, run.stop + room)
        fits = wanted.codes[here] == self.codes[there]
        fits &= self._crossed[there] <= wanted.crossed[here]
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
        wanted: Sequence,
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
        for position in self._nearest(int(wanted.codes[end - 1]), low, high, on):
            length = self._length(wanted, begin, end, position, low)
            if not length:
                continue
            last = after is None or not self._goes_on(wanted, end, position, after)
            jumps = last and after is not None
            gap = abs(position - (again if last else on))
            if length < SHORT_RUN and (gap > NEAR or (jumps and length < end - begin)):
                continue
            # A recompute ends at the operator that asked for it, but for a few behind it that save
            # nothing: ending elsewhere costs as much as it explains.
            score = length - (gap if last else _PER_GAP * gap) - (_JUMP if jumps else 0.0)
            if best is None or score > best[0]:
                best = (score, Run(end - length, position - length + 1, length, last))
            if length == end - begin and not jumps:
                break  # explains all that is left, and no nearer place does
        return None if best is None else best[1]

    def _nearest(self, code: int, low: int, high: int, place: int) -> Iterator[int]:
        """Places within [low, high) of operators of that code, the nearest to ``place`` first."""
        if low <= place < high and self.codes[place] == code:
            yield place
        left, right = self._sorted.searchsorted(code), self._sorted.searchsorted(code, "right")
        places = self._places[left:right]
        places = places[slice(*places.searchsorted((low, high)))]
        nearest: list[int] = places[np.abs(places - place).argsort(kind="stable")].tolist()
        yield from nearest[bool(nearest and nearest[0] == place) :]

    def _goes_on(self, wanted: Sequence, end: int, position: int, after: Run) -> bool:
        """Can the recompute that ran the operator at ``position`` have gone on to ``after``?"""
        if position >= after.place:
            return False
        between = int(self._crossed[position + 1 : after.place + 1].sum())
        return between <= int(wanted.crossed[end : after.start + 1].sum())

    def _length(self, wanted: Sequence, begin: int, end: int, position: int, low: int) -> int:
        longest = min(end - begin, position - low + 1)
        first, place = end - longest, position - longest + 1
        differ = wanted.codes[first:end] != self.codes[place : position + 1]
        crosses = self._crossed[place + 1 : position + 1] > wanted.crossed[first + 1 : end]
        differ[:-1] |= crosses
        breaks = np.flatnonzero(differ)
        if not len(breaks):
            return longest
        last = int(breaks[-1])
        length = longest - 1 - last
        function = wanted.function[first + last : end]
        if crosses[last : last + 1].any() and function[0] == function[1] >= 0:
            # A function that the sequence entered is run from its begin: not from here.
            others = np.flatnonzero(function != function[0])
            return len(others) and len(function) - int(others[0])
        return length


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
    """What is known of sequences of certain operators (bytes of their codes)."""

    known: dict[bytes, Ending]

    def of(self, operators: Int64) -> Ending | None:
        """What is known of this sequence, or of the longest ending of it."""
        text = operators.tobytes() if self.known else b""
        if text in self.known:
            return self.known[text]
        ends = [end for end, what in self.known.items() if what.longer and text.endswith(end)]
        return self.known[max(ends, key=len)] if ends else None


class Reading(Struct, frozen=True):
    """What one sequence was taken for.

    Attributes:
        operators: Codes of its operators.
        expected: Place in the forward pass where its recomputes are expected to end.
        recomputes: First and last place of each, in order of time.
        asked: A node asked for a saved tensor; else it is a checkpoint function's own.
        forgotten: The last place whose results were not kept, and that is not recomputed again.
    """

    operators: Int64
    expected: int
    recomputes: tuple[tuple[int, int], ...]
    asked: bool
    forgotten: int | None

    @property
    def key(self) -> bytes:
        """Equal for equal operators."""
        return self.operators.tobytes()

    @property
    def whole(self) -> Ending:
        """That all of such a sequence may reach as far down as this one."""
        return Ending(len(self.operators), self.expected - min(self.begins))

    @property
    def begins(self) -> list[int]:
        """First place of each recompute, in order of time."""
        return [first for first, _ in self.recomputes]

    @property
    def in_order(self) -> bool:
        """Does none begin before the one that ran before it?"""
        return self.begins == sorted(self.begins)


def correct(endings: Endings, readings: list[Reading]) -> Endings:
    """What else is known, now that all sequences have been read.

    The first fact that is violated counts alone: what it sets right can be what violates others.
    """
    for find in (_by_likeness, _by_order, _by_keeping, _by_crossings):
        found = find(readings)
        if find is _by_likeness:
            found |= {k: e for k, e in _by_longer(readings).items() if k not in endings.known}
        new = {key: ending for key, ending in found.items() if endings.known.get(key) != ending}
        if new:
            return Endings(endings.known | new)
    return endings


def _surest(readings: Iterable[Reading]) -> dict[bytes, Reading]:
    """Of equal sequences the one that was read as most recomputes."""
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


def _by_keeping(readings: Iterable[Reading]) -> dict[bytes, Ending]:
    # What has no gradient is kept as it is: the first block's input tells nothing where others of
    # its operators keep theirs (`_recomputation_hook`).
    readings = list(readings)
    kept = {reading.key for reading in readings if reading.asked and reading.forgotten is None}
    return {
        reading.key: Ending(len(reading.operators), reading.expected - reading.forgotten - 1)
        for reading in readings
        if reading.asked and reading.forgotten is not None and reading.forgotten < reading.expected
        if reading.key not in kept
    }


def _by_crossings(readings: Iterable[Reading]) -> dict[bytes, Ending]:
    spans = [(first, last, reading) for reading in readings for first, last in reading.recomputes]
    endings: dict[bytes, Ending] = {}
    open_ends: list[int] = []
    for first, last, reading in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] < first:
            open_ends.pop()
        # A few operators may be counted to the end of one recompute or to the begin of the next.
        if reading.asked and open_ends and open_ends[-1] + SHORT_RUN < last:
            height = reading.expected - open_ends[-1] - 1
            endings[reading.key] = Ending(len(reading.operators), height)
        open_ends.append(last)
    return {key: ending for key, ending in endings.items() if ending.height >= 0}


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
        piece: It is a further shard of operators that ran whole: no run of its own.
    """

    engine: int
    original: Int64
    again: Int64
    ran: Bool
    inner_function: bool
    by_design: bool = False
    piece: bool = False


class SequenceMatch(Struct, frozen=True):
    """A recompute of which is not known yet what of it really ran; see :class:`Recompute`."""

    engine: int
    original: Int64
    again: Int64
    inner_function: bool
    role: int
    piece: bool


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
        code = self._code = OperatorCodes(calls)
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
        brings_back = self._calls.matching(vocabulary.BRINGS_BACK)[self._calls.name[rows]]
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
        name = vocabulary.function_of(self._calls.names[self._calls.name[engine]])
        return name in self.structure.functions.in_parts

    def _once_each(self, node: NodeSequence, anchor: Anchor) -> list[SequenceMatch]:
        """What a function ran again part by part, in any order: each of its operators once.

        None where its node ran more of a kind than its call, but for shards of all of that kind.
        """
        codes = self._sequence.codes[anchor.first : anchor.last + 1]
        wanted = node.operators.codes
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
            piece=False,
            original=_joined([self.forward[run.place : run.stop] for run in runs]),
            again=_joined([rows[part] for part in parts]),
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


def _joined(parts: list[Ints]) -> Ints:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _unpacks(wanted: Sequence, part: list[Run]) -> bool:
    return bool(wanted.function[part[0].start] < 0) and _explained(part) < SHORT_RUN


def _explained(runs: list[Run]) -> int:
    return sum(run.length for run in runs)
