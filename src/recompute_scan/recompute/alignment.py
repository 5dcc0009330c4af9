"""Finding the forward pass again inside the backward pass: the proof that a call is a recompute.

Each node's operators where a recompute can be (candidates) form one sequence. Each sequence is cut
from its end into the longest runs that the forward pass has too: same names, shapes and types, in
the same order. Three facts give the place:

* a checkpoint function's node has the sequence number of the call in the forward pass, and
  the recompute lies within that call;
* any other node has the sequence number of the operator that it differentiates, and a
  recompute that it asked for ends there or close by;
* identical layers are distinguished by these two, never by their order alone.

Operators that fit nowhere in the forward pass are no recompute and are returned as unexplained.

A checkpoint function may store its input in another form or place before it runs its block, or
after it. Its node runs the block again, but not that work: the operators directly in the function's
call and outside what its node repeats with gradients on (:func:`find_own_work`). A checkpoint
around the function repeats it. torch's function does no such work.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.numpy_tools import changes
from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.roles import AGAIN, MAKES, OperatorCodes, Role, Structure
from recompute_scan.recompute.sequences import (
    NEAR,
    SHORT_RUN,
    ForwardSequence,
    Run,
    Walk,
    until_jump,
    walks_of,
)
from recompute_scan.recompute.work import Ran, Work
from recompute_scan.trace.columns import Bool, Int64, Ints


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


class Alignment(Struct, frozen=True, dict=True):
    """Every recompute of a trace, and the candidates that no part of the forward explains.

    Attributes:
        structure: The roles of all calls.
        forward: Rows of all forward operators, in order of (thread, time); costless ones left
            out.
        backwards: One entry per forward row: how many backward passes went through it, or
            through what a function or a model ran of it by design; 0 for an operator without
            gradients, or without a backward in the trace.
        passes: How many went through it or ran it again, at least 1. A pass that ends early
            (``autograd.grad`` with respect to the last weight of a block) runs all of a
            checkpoint's work again and goes through some of its nodes only.
        through: One of the backward passes that went through it, the same one for all operators
            that such passes link; -1 for none, or where it is unknown.
        recomputes: In order of time.
        unexplained: Rows of candidates that match nothing.
    """

    structure: Structure
    forward: Int64
    backwards: Int64
    passes: Int64
    through: Int64
    recomputes: tuple[Recompute, ...]
    unexplained: Int64

    @cached_property
    def original(self) -> Int64:
        """Rows of the forward operators of all recomputes, one recompute after the other."""
        return np.concatenate([*(each.original for each in self.recomputes), self.forward[:0]])

    @cached_property
    def again(self) -> Int64:
        """Rows of the same operators' second runs."""
        return np.concatenate([*(each.again for each in self.recomputes), self.forward[:0]])

    @cached_property
    def ran(self) -> Bool:
        """Whether each really ran."""
        return np.concatenate([*(each.ran for each in self.recomputes), np.zeros(0, np.bool_)])

    @cached_property
    def places(self) -> Int64:
        """Positions of the same operators in ``forward``."""
        return self.forward.searchsorted(self.original)

    @cached_property
    def by_design(self) -> Bool:
        """Whether each ran again as a function or a model is made, and for no checkpoint."""
        return self._of_each([each.by_design for each in self.recomputes])

    @cached_property
    def piece(self) -> Bool:
        """Whether each is in a further shard of operators that ran whole, and no separate run."""
        return self._of_each([each.piece for each in self.recomputes])

    def _of_each(self, values: list[bool]) -> Bool:
        sizes = np.diff(self.begins, append=len(self.again))
        return np.array(values, np.bool_).repeat(sizes)

    @cached_property
    def begins(self) -> Int64:
        """For each recompute: where its operators begin in these."""
        sizes = [0, *(len(each.again) for each in self.recomputes)]
        return np.cumsum(sizes, dtype=np.int64)[:-1]


def align(structure: Structure, work: Work, starts: Int64) -> Alignment:
    """Match every candidate sequence with the forward pass.

    ``starts`` has the start of each step in ns, ascending: a recompute repeats work of its step.
    """
    calls = structure.calls
    neutral = calls.where(vocabulary.NEUTRAL.match)
    forward = np.flatnonzero((structure.role == Role.FORWARD) & ~neutral)
    candidates = np.flatnonzero(AGAIN[structure.role] & ~neutral)
    matcher = Matcher(structure, forward, candidates, starts)
    matches, unexplained = _match_all(matcher, {})
    heights = _heights(matcher, matches)
    if heights:
        matches, unexplained = _match_all(matcher, heights)
    recomputes = _with_work(matches, structure, Ran(calls, work, neutral))
    recomputes = _without_looks(recomputes, structure, matcher)
    backwards, passes = matcher.anchors.count_passes(recomputes)
    return Alignment(
        structure=structure,
        forward=forward,
        backwards=backwards,
        passes=passes,
        through=matcher.anchors.find_passes(),
        recomputes=recomputes,
        unexplained=np.concatenate([*unexplained, candidates[:0]]),
    )


def _match_all(
    matcher: Matcher, heights: Mapping[bytes, int]
) -> tuple[list[Recompute], list[Int64]]:
    """Recomputes of all sequences, in order of time, and what is left of each sequence."""
    matches: list[Recompute] = []
    unexplained: list[Int64] = []
    for place, sequence in enumerate(matcher.sequences):
        found = matcher.match(place, heights)
        matched = sum(len(match.again) for match in found)
        if sequence.role == Role.OWN_WORK:
            found = _repeated(found, matches)
        elif 2 * matched < len(sequence.rows):
            unexplained.append(sequence.rows)
            continue
        for match in found:
            matcher.anchors.remember(match.again, match.original)
        matches.extend(found)
        if matched < len(sequence.rows) and sequence.role != Role.OWN_WORK:
            known = [match.again for match in found]
            unexplained.append(sequence.rows[~np.isin(sequence.rows, np.concatenate(known))])
    return matches, unexplained


def _without_looks(
    recomputes: tuple[Recompute, ...], structure: Structure, matcher: Matcher
) -> tuple[Recompute, ...]:
    """The recomputes except of hooks that look at operators with another backward pass.

    Gradient caching runs forward work without gradients first, and again in a gradient hook.
    """
    hooked = {
        id(each)
        for each in recomputes
        if each.by_design and not structure.checkpoint_node[each.engine]
    }
    if not hooked:
        return recomputes
    own, _ = matcher.anchors.count_passes(())
    return tuple(
        each
        for each in recomputes
        if id(each) not in hooked
        or 2 * np.count_nonzero(own[matcher.forward.searchsorted(each.original)])
        <= len(each.original)
    )


def _repeated(found: list[Recompute], matches: list[Recompute]) -> list[Recompute]:
    """Own work of a function that repeats operators which the same node recomputes.

    A reversible layer gets its input back from its output so, and then runs again with gradients.
    A few operators that both have in common are no run of the block.
    """
    if not found:
        return found
    engine = found[0].engine
    mine = itertools.takewhile(lambda match: match.engine == engine, reversed(matches))
    known = np.concatenate([found[0].original[:0], *(match.original for match in mine)])
    again = np.concatenate([match.original for match in found])
    if 2 * np.count_nonzero(np.isin(known, again)) < len(known):
        return []
    return [match for match in found if np.isin(match.original, known).any()]


def _with_work(found: list[Recompute], structure: Structure, ran: Ran) -> tuple[Recompute, ...]:
    """The recomputes, with what of each really ran."""
    if not found:
        return ()
    ends = np.cumsum([len(each.again) for each in found])
    checkpoint = structure.checkpoint_node[[each.engine for each in found]]
    # Only a non-reentrant recompute stops early, and not inside a function that it runs again.
    whole = checkpoint | np.array([each.inner_function for each in found], np.bool_)
    original = np.concatenate([each.original for each in found])
    again = np.concatenate([each.again for each in found])
    parts = np.split(ran.of(original, again, ends - 1, whole), ends[:-1])
    return tuple(replace(each, ran=part) for each, part in zip(found, parts, strict=True))


def _heights(matcher: Matcher, matches: list[Recompute]) -> dict[bytes, int]:
    """Of each sequence that ran operators twice: how many places lie between its beginning and end.

    The lowest of all sequences of the same operators. With early stop there is none: an outer
    checkpoint's recompute ends before what the inner one's begins with.
    """
    of_engine: dict[int, list[Int64]] = defaultdict(list)
    for match in matches:
        of_engine[match.engine].append(match.original)
    heights: dict[bytes, int] = {}
    for sequence in matcher.sequences:
        found = of_engine[sequence.engine]
        if len(found) < 2 or matcher.structure.checkpoint_node[sequence.engine]:
            continue
        rows = np.concatenate(found)
        anchor = matcher.anchors.find(sequence.engine)
        if anchor is not None and len(np.unique(rows)) < len(rows):
            height = anchor.last - int(matcher.forward.searchsorted(rows.min()))
            key = sequence.codes.tobytes()
            heights[key] = min(height, heights.get(key, height))
    return heights


class Anchor(Struct, frozen=True):
    """Where a sequence is expected: places in the forward sequence.

    ``first`` and ``last`` bound the checkpointed call; ``first`` is -1 where only the expected
    end is known.
    """

    first: int
    last: int


class Anchors:
    """Finds the anchor of an engine range, and knows what has been matched so far."""

    def __init__(self, structure: Structure, forward: Int64, engines: Int64) -> None:
        self._calls = calls = structure.calls
        self._structure = structure
        self._forward = forward
        self._origin = np.full(len(calls), -1, np.int32)
        self._origin[forward] = forward
        self._made = self._find_made()
        table = structure.evaluations
        asked = self._made[table.row.searchsorted(engines)]
        self._askers = dict(zip(engines.tolist(), asked.tolist(), strict=True))

    def remember(self, again: Int64, original: Int64) -> None:
        """Keep which forward operator each recomputed one repeats, for sequences inside it."""
        self._origin[again] = original

    def find(self, engine: int) -> Anchor | None:
        """Where the recomputes of an engine range are expected to end, and to begin if known."""
        row = self._askers[engine]
        return None if row < 0 else self._place(row, engine)

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

    def _place(self, row: int, engine: int) -> Anchor | None:
        """Where the forward run of ``row`` stands: an operator, or a checkpoint function."""
        if self._structure.function[row] == row:
            origins = self._origin[row + 1 : row + 1 + int(self._calls.size[row])]
            origins = origins[origins >= 0]
            if not len(origins):
                return None
            whole = bool(self._structure.checkpoint_node[engine])
            first = int(self._forward.searchsorted(origins.min())) if whole else -1
            return Anchor(first, int(self._forward.searchsorted(origins.max())))
        origin = int(self._origin[row])
        return None if origin < 0 else Anchor(-1, int(self._forward.searchsorted(origin)))

    def count_passes(self, recomputes: Sequence[Recompute]) -> tuple[Int64, Int64]:
        """For each forward operator: how many backward passes went through its node; and how many
        did or ran it again, at least 1.

        A checkpoint function's node stands for all its operators, and what a function or a model
        ran again by design went backward where that did.
        """
        pairs, table = self._pairs, self._structure.evaluations
        if pairs is None:
            # No sequence numbers in this trace: all that ran before a backward has one.
            start = self._calls.start
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

    Attributes:
        structure: The roles of all calls.
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
        self.anchors = Anchors(structure, forward, engines)
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
        codes, function = self._code[rows], structure.function[rows]
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
            if not own or len(walk.at) >= SHORT_RUN or node.function[walk.at[0]] >= 0
        ]
        walks = [*self._sequence.in_order(node.codes, others), *own]
        return [self._matched(node, walk) for walk in walks]

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
            Recompute(
                engine=node.engine,
                original=self.forward[places[begin:end]],
                again=rows[begin:end],
                ran=places[begin:end] >= 0,
                inner_function=False,
                by_design=node.role != Role.RECOMPUTE,
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
            own = until_jump(self._sequence.cut(wanted, end, first, most, last))
            end = min((run.start for run in own), default=end)
        before = [] if within else own
        rest = self._sequence.cut(wanted, end, lowest, ceiling, last, before)
        return walks_of([*own, *rest] if within else rest)

    def _matched(self, node: NodeSequence, walk: Walk) -> Recompute:
        functions = node.function[walk.at]
        return Recompute(
            engine=node.engine,
            original=self.forward[walk.places],
            again=node.rows[walk.at],
            ran=walk.places >= 0,
            by_design=node.role != Role.RECOMPUTE,
            inner_function=bool(np.count_nonzero(functions >= 0) * 2 > len(functions)),
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
