"""Operators of the backward pass matched with operators of the forward pass.

A node's operators are one sequence. The sequence is cut from its end into runs: operators in a row
that the forward pass has in the same row: same names, shapes and types. A recompute goes through
the forward pass from its first operator to its last and may leave some out. Where the places stop
rising, one recompute ends and another begins. The place of each is known (:class:`Anchors`):

* a checkpoint function's node has the sequence number of the call in the forward pass, and
  the recompute lies within that call;
* any other node has the sequence number of the operator that it differentiates, and a
  recompute that it asked for ends there or close by.

Where layers are equal, a sequence can be one recompute of two layers or two recomputes of one. Two
facts decide:

* what the innermost checkpoint recomputes is not asked for again, so the last recompute begins
  behind the operator of the node that asks next;
* sequences of the same operators come from checkpoints of the same kind. Without early stop, a node
  asks for two runs of one layer, and the first layer's can be read in no other way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.numpy_tools import changes
from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.roles import MAKES, OperatorCodes, Role, Structure
from recompute_scan.trace.columns import Bool, Int64

# A shorter run is evidence only near the place where it is expected.
SHORT_RUN = 3
# How far from that place, in operators, a short run may end.
NEAR = 8
# Two layers of one kind, or two forward passes, differ by no more of their operators.
LIKE = 0.2


def alike(one: Int64, other: Int64) -> bool:
    """Do two sequences of codes begin alike and have about the same length?"""
    if abs(len(one) - len(other)) > LIKE * max(len(one), len(other)):
        return False
    head = min(len(one), len(other), 8)
    return np.array_equal(one[:head], other[:head])


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
        self._places = codes.argsort(kind="stable")
        self._sorted = codes[self._places]

    def cut(
        self,
        wanted: Int64,
        end: int,
        low: int,
        high: int,
        expected: int,
        behind: Iterable[Run] = (),
    ) -> list[Run]:
        """``wanted[:end]`` as runs of this sequence within [low, high), the last run first.

        Each run is the longest that ends where the next one begins. Among runs of equal length the
        nearest to its expected place is taken. Operators that fit nowhere are passed over.

        Args:
            wanted: Codes of the sequence.
            end: Behind the last operator to cut.
            low: First place allowed.
            high: Place behind the last allowed.
            expected: Where the last operator is expected.
            behind: Runs already cut from the same sequence; the result begins with them.
        """
        runs = list(behind)
        while end:
            best = self._best(wanted, end, low, high, expected, runs)
            if best is None:
                end -= 1
                continue
            if best.last and runs:
                runs[-1:] = self._shared_out(wanted, best, runs[-1], runs[0].stop)
            else:
                runs.append(best)
            end = best.start
        return runs

    def in_order(self, wanted: Int64, walks: list[Walk]) -> list[Walk]:
        """The walks from the outermost checkpoint's to the innermost's, if operators fit so too."""
        if len(walks) < 2:
            return walks
        at = np.concatenate([walk.at for walk in walks])
        ordered = sorted((walk.places for walk in walks), key=lambda places: int(places[0]))
        if not np.array_equal(wanted[at], self.codes[np.concatenate(ordered)]):
            return walks
        ends = np.cumsum([len(places) for places in ordered])
        return [Walk(*both) for both in zip(np.split(at, ends[:-1]), ordered, strict=True)]

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
            after, start=after.start + more, place=after.place + more, length=after.length - more
        )
        return [later, replace(run, length=run.length + more)]

    def _best(
        self, wanted: Int64, end: int, low: int, high: int, expected: int, runs: list[Run]
    ) -> Run | None:
        after = runs[-1] if runs else None
        on = expected if after is None else after.place - 1
        # All recomputes of one sequence were asked for by one node, and end near it.
        again = expected if after is None else runs[0].stop - 1
        best: tuple[int, Run] | None = None
        for position in self._nearest(int(wanted[end - 1]), low, high, on):
            length = self._length(wanted, end, position, low)
            if not length:
                continue
            last = after is None or position >= after.place
            jumps = last and after is not None
            gap = abs(position - (again if last else on))
            if length < SHORT_RUN and (gap > NEAR or (jumps and length < end)):
                continue
            # A recompute ends at the operator that asked for it, or a few operators later that
            # save nothing, and may leave some out, such as a cast that autocast cached: each
            # operator of the distance costs as much as one that fits gains.
            score = length - gap
            if best is None or score > best[0]:
                best = (score, Run(end - length, position - length + 1, length, last))
            if length == end and not jumps:
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

    def _length(self, wanted: Int64, end: int, position: int, low: int) -> int:
        longest = min(end, position - low + 1)
        differ = wanted[end - longest : end] != self.codes[position - longest + 1 : position + 1]
        breaks = np.flatnonzero(differ)
        return longest - 1 - int(breaks[-1]) if len(breaks) else longest


class Walk(Struct, frozen=True):
    """One recompute: positions in the sequence, and the same operators' places in the forward."""

    at: Int64
    places: Int64


def walks_of(runs: list[Run]) -> list[Walk]:
    """Runs (latest first) grouped into single walks through the forward, in order of time."""
    groups: list[list[Run]] = []
    for run in runs:
        if run.last:
            groups.append([])
        groups[-1].append(run)
    return [
        Walk(
            np.concatenate([np.arange(run.start, run.start + run.length) for run in group[::-1]]),
            np.concatenate([np.arange(run.place, run.stop) for run in group[::-1]]),
        )
        for group in groups[::-1]
    ]


class Recompute(Struct, frozen=True):
    """Forward operators in order, run again.

    Attributes:
        engine: Row of the engine range in which it ran.
        original: Rows of the forward operators, in order.
        again: Rows of the same operators' second run; same length.
        ran: Whether each really ran. Where early stop cuts a recompute short, its last operator
            is entered but does no work; selective checkpointing returns saved results.
        by_design: A function or the model did it, for another reason than a checkpoint.
        piece: It is a further shard of operators that ran whole, and no separate run.
    """

    engine: int
    original: Int64
    again: Int64
    ran: Bool
    by_design: bool = False
    piece: bool = False


class Anchor(Struct, frozen=True):
    """Where a sequence is expected: places in the forward sequence.

    ``first`` and ``last`` bound the checkpointed call; ``first`` is -1 where only the expected
    end is known.
    """

    first: int
    last: int


class Anchors:
    """Finds the anchor of an engine range, and knows what has been matched so far."""

    def __init__(self, structure: Structure, forward: Int64) -> None:
        self._structure = structure
        self._forward = forward
        self._origin = np.full(len(structure.calls), -1, np.int32)
        self._origin[forward] = forward
        self._made = self._find_made()

    def remember(self, again: Int64, original: Int64) -> None:
        """Keep which forward operator each recomputed one repeats, for sequences inside it."""
        self._origin[again] = original

    def find(self, engine: int) -> Anchor | None:
        """Where the recomputes of an engine range are expected to end, and to begin if known.

        There stands the forward run of the operator, or function, that made its node.
        """
        structure = self._structure
        row = int(self._made[structure.evaluations.row.searchsorted(engine)])
        if row < 0:
            return None
        whole = structure.function[row] == row
        inside = slice(row + 1, row + 1 + int(structure.calls.size[row])) if whole else row
        origins = np.atleast_1d(self._origin[inside])
        origins = origins[origins >= 0]
        if not len(origins):
            return None
        first, last = self._forward.searchsorted((origins.min(), origins.max())).tolist()
        return Anchor(first if whole and structure.checkpoint_node[engine] else -1, last)

    def _find_made(self) -> Int64:
        """Row of the operator, or of the checkpoint function, that made each evaluation's node.

        -1 where none is known. A node in a nested backward pass was made by the recompute that
        started the pass, and by no other.
        """
        structure, table = self._structure, self._structure.evaluations
        maker = table.maker.copy()
        # Before torch 2.4, operators under a dispatch mode have their numbers from their nodes.
        filled = structure.filled[structure.number[structure.filled].argsort(kind="stable")]
        numbers = structure.number[filled]
        at = numbers.searchsorted(table.number)
        same = (maker < 0) & (np.append(numbers, -1)[at] == table.number) & (table.number >= 0)
        maker[same] = np.append(filled, -1)[at[same]]
        around = np.append(table.made_in, -1)[table.parent]
        mine = (maker >= 0) & (table.of[maker] == around)
        made = np.where(structure.top[maker] >= 0, structure.top[maker], maker)
        return np.where(mine & MAKES[structure.role[made]], made, -1).astype(np.int64)

    def count_passes(self, recomputes: Sequence[Recompute]) -> tuple[Int64, Int64]:
        """For each forward operator: how many backward passes went through its node; and how many
        did or ran it again, at least 1.

        A checkpoint function's node stands for all its operators, and what a function or a model
        ran again by design went backward where that did.
        """
        pairs, table = self._pairs, self._structure.evaluations
        if pairs is None:
            # No sequence numbers in this trace: all that ran before a backward has one.
            start = self._structure.calls.start
            last = start[table.row].max(initial=-1)
            backwards = np.asarray(start[self._forward] < last, np.int64)
            return backwards, np.maximum(backwards, 1)
        owner, many = self._owners, len(table.row)
        backwards = pairs.searchsorted((owner + 1) * many) - pairs.searchsorted(owner * many)
        extra = []
        for each in recomputes:
            place = self._forward.searchsorted(each.original)
            one = int(table.root_pass[table.row.searchsorted(each.engine)])
            extra.append(2 * (place * many + one) + each.by_design)
        if not extra:
            return backwards, np.maximum(backwards, 1)
        found = np.unique(np.concatenate(extra))
        place, by_design = found // 2 // many, found % 2 > 0
        new = ~np.isin(owner[place] * many + found // 2 % many, pairs)
        ran = np.unique(found[new] // 2, return_counts=True)[0] // many
        passes = backwards + np.bincount(ran, minlength=len(backwards))
        designed = np.unique(place[by_design & (backwards[place] == 0)], return_counts=True)
        backwards[designed[0]] = designed[1]
        return backwards, np.maximum(passes, 1)

    def find_passes(self) -> Int64:
        """``Alignment.through``."""
        through = np.full(len(self._forward), -1, np.int64)
        if self._pairs is None:
            return through
        many = len(self._structure.evaluations.row)
        owner, one = self._pairs // many, self._pairs % many
        linked = np.flatnonzero(owner[1:] == owner[:-1])
        first = np.arange(int(one.max(initial=-1)) + 1)
        for link in np.unique(np.stack((one[linked], one[linked + 1]), 1), axis=0):
            first[np.isin(first, first[link])] = first[link].min()
        at = owner.searchsorted(self._owners)
        mine = np.append(owner, -1)[at] == self._owners
        through[mine] = first[one[at[mine]]]
        return through

    @cached_property
    def _pairs(self) -> Int64 | None:
        """An owner's row and a backward pass, as one number each, ascending."""
        structure, table = self._structure, self._structure.evaluations
        root = np.flatnonzero((table.parent < 0) & (table.number >= 0))
        if not len(root) or not (structure.number[self._forward] >= 0).any():
            return None
        root = root[self._made[root] >= 0]
        return np.unique(self._made[root] * np.int64(len(table.row)) + table.root_pass[root])

    @cached_property
    def _owners(self) -> Int64:
        """For each forward operator: its row, or the row of the outermost function around it."""
        outer = self._structure.outer_function[self._forward]
        return np.where(outer >= 0, outer, self._forward).astype(np.int64)


class NodeSequence(Struct, frozen=True):
    """Operators that one node's engine range ran and that can be a recompute.

    Attributes:
        engine: Row of the engine range.
        lowest: First place of the forward pass that they may repeat.
        highest: Place behind the last.
        role: The :class:`Role` of all of them.
    """

    engine: int
    rows: Int64
    codes: Int64
    lowest: int
    highest: int
    role: int


class Matcher:
    """Matches the sequences of one trace with its forward pass.

    Attributes:
        forward: Rows of the operators of the forward pass.
        sequences: The operators that could be recomputes of each node, in order of time.
        anchors: Where each of them is expected.
    """

    def __init__(
        self, structure: Structure, forward: Int64, candidates: Int64, starts: Int64
    ) -> None:
        self.forward = forward
        self._calls = calls = structure.calls
        self.structure = structure
        self._code = OperatorCodes(calls)
        self._sequence = ForwardSequence(self._code[forward])
        self._one_thread = len(np.unique(calls.thread[forward])) <= 1
        numbers = structure.number[forward]
        # A node with a lower number was made before the trace begins.
        self._first_number = int(numbers[numbers >= 0].min(initial=2**31 - 1))
        self.sequences = self._list_sequences(candidates, starts)
        engines = np.array([sequence.engine for sequence in self.sequences], np.int64)
        self.anchors = Anchors(structure, forward)
        self._following = self._find_following(engines)

    def _find_following(self, engines: Int64) -> Int64:
        """For each sequence: the next that a node of the same pass asked for, or -1."""
        table = self.structure.evaluations
        passes = table.engine_pass[table.row.searchsorted(engines)]
        following = np.full(len(engines), -1, np.int64)
        asked = np.flatnonzero(~self.structure.checkpoint_node[engines])
        asked = asked[passes[asked].argsort(kind="stable")]
        same = passes[asked[1:]] == passes[asked[:-1]]
        following[asked[:-1][same]] = asked[1:][same]
        return following

    def _list_sequences(self, candidates: Int64, starts: Int64) -> list[NodeSequence]:
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
        codes = self._code[rows]
        ends = np.append(begins[1:], len(rows))
        columns = (engines, begins, ends, lowest, highest, role[begins])
        return [
            NodeSequence(node, rows[a:b], codes[a:b], low, high, what)
            for node, a, b, low, high, what in zip(*map(np.ndarray.tolist, columns), strict=True)
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

    def match(self, place: int, heights: Mapping[bytes, int]) -> list[Recompute]:
        """The recomputes that the sequence at a place consists of, in order of time.

        ``heights`` has, by the operators of a sequence, how far below its end it may begin.
        """
        node = self.sequences[place]
        engine, lowest = node.engine, node.lowest
        anchor = self.anchors.find(engine)
        checkpoint_node = bool(self.structure.checkpoint_node[engine])
        before = 0 <= self.structure.number[engine] < self._first_number
        function = vocabulary.function_of(self._calls.called(engine))
        if anchor is None and before and self._one_thread and not checkpoint_node:
            return []
        if checkpoint_node and function in self.structure.functions.in_parts:
            if node.role == Role.BY_DESIGN and anchor is not None and anchor.first >= 0:
                whole = self._once_each(node, anchor)
                if whole:
                    return whole
            elif node.role == Role.RECOMPUTE and anchor is not None:
                # An outer checkpoint's, asked for by the function's node.
                checkpoint_node, anchor = False, Anchor(-1, anchor.last)
        if anchor is not None and not checkpoint_node:
            anchor = Anchor(self._behind_next(place, anchor.last), anchor.last)
            if heights:
                height = heights.get(node.codes.tobytes(), anchor.last)
                lowest = max(lowest, anchor.last - height)
        walks = self._walks(node, anchor, lowest, within=checkpoint_node)
        own = walks[-1:] if checkpoint_node else []
        # The node's recompute of its function comes last. Before it, an outer checkpoint can
        # have run the function, and a few operators the unpacking of the node's inputs.
        others = [
            walk
            for walk in (walks[:-1] if own else walks)
            if not own
            or len(walk.at) >= SHORT_RUN
            or self.structure.function[node.rows[walk.at[0]]] >= 0
        ]
        walks = [*self._sequence.in_order(node.codes, others), *own]
        return [self._found(node, node.rows[walk.at], walk.places) for walk in walks]

    def _once_each(self, node: NodeSequence, anchor: Anchor) -> list[Recompute]:
        """The operators that a function ran again part by part, in any order, each once.

        Empty where its node ran more operators of a kind than its call, except a whole number of
        shards of each. Operators of other kinds are its own work between the parts.
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
        rows, places = node.rows[places >= 0], places[places >= 0] + anchor.first
        cuts = [0, *(np.flatnonzero(places[1:] < places[:-1]) + 1).tolist(), len(places)]
        return [
            self._found(
                node,
                rows[begin:end],
                places[begin:end],
                piece=2 * np.isin(places[begin:end], places[:begin]).sum() > end - begin,
            )
            for begin, end in itertools.pairwise(cuts)
        ]

    def _behind_next(self, place: int, last: int) -> int:
        """Place behind the operator of the node that asks next in the same pass; -1 if unknown."""
        following = int(self._following[place])
        anchor = self.anchors.find(self.sequences[following].engine) if following >= 0 else None
        return anchor.last + 1 if anchor is not None and anchor.last < last else -1

    def _walks(
        self, node: NodeSequence, anchor: Anchor | None, lowest: int, *, within: bool
    ) -> list[Walk]:
        """The recomputes of a sequence, in order of time; the last is expected at the anchor.

        ``within``: the last one lies within the anchor, and others go to its end.
        """
        wanted, end = node.codes, len(node.codes)
        last = anchor.last if anchor is not None else node.highest - 1
        ceiling = min(node.highest, last + end + NEAR)
        own: list[Run] = []
        if anchor is not None and anchor.first >= 0:
            most = last + 1 if within else ceiling
            first = max(anchor.first, lowest)
            runs = self._sequence.cut(wanted, end, first, most, last)
            # The runs of one recompute, the last of the sequence.
            own = [*runs[:1], *itertools.takewhile(lambda run: not run.last, runs[1:])]
            end = min((run.start for run in own), default=end)
        before = [] if within else own
        rest = self._sequence.cut(wanted, end, lowest, ceiling, last, before)
        return walks_of([*own, *rest] if within else rest)

    def _found(
        self, node: NodeSequence, rows: Int64, places: Int64, *, piece: bool = False
    ) -> Recompute:
        return Recompute(
            engine=node.engine,
            original=self.forward[places],
            again=rows,
            ran=places >= 0,
            by_design=node.role != Role.RECOMPUTE,
            piece=piece,
        )


def _turn_by_turn(wanted: Int64, codes: Int64, *, shards: bool = False) -> Int64 | None:
    """Place of each of ``wanted`` in ``codes``, the n-th of a kind as the n-th; or ``None``.

    With ``shards`` the same again for each further shard. A kind that ``codes`` lack has -1, and
    those are the fewer.
    """
    places = np.full(len(wanted), -1, np.int64)
    for code in np.unique(wanted).tolist():
        here, there = np.flatnonzero(wanted == code), np.flatnonzero(codes == code)
        if not len(there):
            continue
        if len(here) > len(there) and (not shards or len(here) % len(there)):
            return None
        places[here] = np.resize(there, len(here))
    return places if 2 * np.count_nonzero(places < 0) < len(places) else None
