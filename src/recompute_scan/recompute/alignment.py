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

from collections import defaultdict
from functools import cached_property

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.roles import AGAIN, Role, Structure
from recompute_scan.recompute.sequences import (
    Endings,
    Matcher,
    Reading,
    Recompute,
    SequenceMatch,
    correct,
)
from recompute_scan.recompute.work import Ran, Work
from recompute_scan.trace.calls import Calls
from recompute_scan.trace.columns import Bool, Int64

# Mending some readings can show that others were wrong.
_CORRECTIONS = 2


class Alignment(Struct, frozen=True, dict=True):
    """Every recompute of a trace, and the candidates that no part of the forward explains.

    Attributes:
        forward: Rows of all forward operators, in order of (thread, time); costless ones left
            out.
        backwards: One entry per forward row: how many backward passes went through it, or
            through what a function or a model ran of it by design; 0 for an operator without
            gradients, or whose backward is not in the trace.
        passes: How many went through it or ran it again, at least 1. A pass that ends early
            (``autograd.grad`` with respect to the last weight of a block) runs all of a
            checkpoint's work again and goes through some of its nodes only.
        recomputes: In order of time.
        unexplained: Rows of candidates that match nothing.
    """

    forward: Int64
    backwards: Int64
    passes: Int64
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
        """Whether each is in a further shard of what ran whole: no run of its own."""
        return self._of_each([each.piece for each in self.recomputes])

    def _of_each(self, values: list[bool]) -> Bool:
        sizes = np.diff(self.begins, append=len(self.again))
        return np.array(values, np.bool_).repeat(sizes)

    @cached_property
    def begins(self) -> Int64:
        """For each recompute: where its operators begin in these."""
        sizes = [0, *(len(each.again) for each in self.recomputes)]
        return np.cumsum(sizes, dtype=np.int64)[:-1]


def align(calls: Calls, structure: Structure, work: Work, starts: Int64) -> Alignment:
    """Match every candidate sequence with the forward pass.

    Args:
        calls: The trace's calls.
        structure: Their roles.
        work: Their work on the device; tells operators that were entered but did nothing.
        starts: Start of each step in ns, ascending; a recompute repeats work of its own step.
    """
    neutral = calls.matching(vocabulary.NEUTRAL)[calls.name]
    forward = np.flatnonzero((structure.role == Role.FORWARD) & ~neutral)
    candidates = np.flatnonzero(AGAIN[structure.role] & ~neutral)
    matcher = Matcher(calls, structure, forward, candidates, starts)
    endings = Endings({})
    matches, unexplained = _match_all(matcher, endings)
    for _ in range(_CORRECTIONS):
        corrected = correct(endings, _readings(matcher, matches))
        if corrected == endings:
            break
        endings = corrected
        matches, unexplained = _match_all(matcher, endings)
    recomputes = _with_work(matches, structure, Ran(calls, work, forward, neutral))
    recomputes = _without_looks(recomputes, structure, matcher)
    backwards, passes = matcher.anchors.count_passes(recomputes)
    return Alignment(
        forward=forward,
        backwards=backwards,
        passes=passes,
        recomputes=recomputes,
        unexplained=np.concatenate([*unexplained, candidates[:0]]),
    )


def _match_all(matcher: Matcher, endings: Endings) -> tuple[list[SequenceMatch], list[Int64]]:
    """Recomputes of all sequences, in order of time, and what is left of each sequence."""
    matches: list[SequenceMatch] = []
    unexplained: list[Int64] = []
    for sequence in matcher.sequences:
        found = matcher.match(sequence, endings)
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
    """The recomputes without those of hooks that only look at what has a backward pass of its own.

    Gradient caching runs forward work without gradients first, and in a hook for its backward pass.
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


def _repeated(found: list[SequenceMatch], matches: list[SequenceMatch]) -> list[SequenceMatch]:
    """Of what a function runs of its block beside the recompute: what the same node ran again.

    A reversible layer gets its input back from its output so, and then runs again with gradients.
    """
    if not found:
        return found
    mine = [match.original for match in matches if match.engine == found[0].engine]
    known = np.concatenate([found[0].original[:0], *mine])
    return [match for match in found if np.isin(match.original, known).any()]


def _with_work(
    matches: list[SequenceMatch], structure: Structure, ran: Ran
) -> tuple[Recompute, ...]:
    """The recomputes, with what of each really ran."""
    if not matches:
        return ()
    original, again = _all_rows(matches)
    stops = np.cumsum([len(match.again) for match in matches])
    checkpoint = structure.checkpoint_node[[match.engine for match in matches]]
    # Only a non-reentrant recompute stops early, and not inside a function that it runs again.
    whole = checkpoint | np.array([match.inner_function for match in matches], np.bool_)
    parts = np.split(ran.of(original, again, stops - 1, whole), stops[:-1])
    return tuple(
        Recompute(
            match.engine,
            match.original,
            match.again,
            part,
            match.inner_function,
            match.role != Role.RECOMPUTE,
            match.piece,
        )
        for match, part in zip(matches, parts, strict=True)
    )


def _all_rows(matches: list[SequenceMatch]) -> tuple[Int64, Int64]:
    """Rows of all first runs, and of the second runs of the same operators."""
    none = np.zeros(0, np.int64)
    return (
        np.concatenate([*(match.original for match in matches), none]),
        np.concatenate([*(match.again for match in matches), none]),
    )


def _readings(matcher: Matcher, matches: list[SequenceMatch]) -> list[Reading]:
    """How each sequence with an expected end was read."""
    of_engine: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for match in matches:
        places = matcher.forward.searchsorted(match.original)
        of_engine[match.engine].append((int(places.min()), int(places.max())))
    readings = []
    for sequence in matcher.sequences:
        spans = of_engine[sequence.engine]
        anchor = matcher.anchors.find(sequence.engine) if spans else None
        if anchor is not None:
            asked = not matcher.structure.checkpoint_node[sequence.engine]
            readings.append(Reading(sequence.codes, anchor.last, tuple(spans), asked))
    return readings


class OwnWork(Struct, frozen=True):
    """Work of checkpoint functions outside their blocks, in the forward pass.

    Attributes:
        rows: Rows of its operators, in order.
        recompute: For each: position in ``Alignment.recomputes`` of what its function ran again.
    """

    rows: Int64
    recompute: Int64


def find_own_work(calls: Calls, structure: Structure, alignment: Alignment) -> OwnWork:
    """The own work of all checkpoint functions in a trace."""
    blocks: dict[int, tuple[int, int, int]] = {}
    for number, recompute in enumerate(alignment.recomputes):
        if not is_of_others(calls, structure, recompute.engine):
            continue
        begin = first_of_block(structure, recompute.again)
        rows, again = recompute.original[begin:], recompute.again[begin:]
        middle = len(rows) // 2
        # A node runs again what its call holds, further functions' calls among that.
        around = _calls_around(calls, structure, int(rows[middle]))
        inside = len(_calls_around(calls, structure, int(again[middle])))
        name = vocabulary.function_of(calls.names[calls.name[recompute.engine]])
        if inside < len(around) and calls.names[calls.name[around[inside]]] == name:
            first, last, _ = blocks.get(around[inside], (len(calls), -1, number))
            bounds = min(first, int(rows.min())), max(last, int(rows.max()))
            blocks[around[inside]] = *bounds, number
    found, owners = [alignment.forward[:0]], [alignment.forward[:0]]
    for call, (first, last, number) in blocks.items():
        stop = call + 1 + int(calls.size[call])
        begin, end = alignment.forward.searchsorted((call, stop)).tolist()
        rows = alignment.forward[begin:end]
        outside = (rows < first) | (rows > last)
        found.append(rows[outside & (structure.function[rows] == call)])
        owners.append(np.full(len(found[-1]), number))
    rows, owner = np.concatenate(found), np.concatenate(owners)
    order = rows.argsort()
    return OwnWork(rows[order], owner[order])


def is_of_others(calls: Calls, structure: Structure, engine: int) -> bool:
    """Is the node in this engine's range that of a checkpoint function, and not of torch's own?"""
    if not structure.checkpoint_node[engine]:
        return False
    return vocabulary.function_of(calls.names[calls.name[engine]]) != vocabulary.TORCHS_FUNCTION


def without_gradients(alignment: Alignment, own: OwnWork) -> Alignment:
    """The alignment, in which that work has no backward pass: its function's is its block's."""
    backwards = alignment.backwards.copy()
    backwards[alignment.forward.searchsorted(own.rows)] = 0
    return replace(alignment, backwards=backwards)


def first_of_block(structure: Structure, again: Int64) -> int:
    """Place of the first operator that autograd records, or that is another function's; 0: none.

    A function's node runs its block with gradients on, and brings the input back without.
    """
    inside = (structure.number[again] >= 0) | (structure.function[again] >= 0)
    return int(np.flatnonzero(inside)[0]) if inside.any() else 0


def _calls_around(calls: Calls, structure: Structure, row: int) -> list[int]:
    """Rows of the calls of checkpoint functions around a call, innermost first.

    In a recompute, those inside the node that runs it.
    """
    found = []
    call = int(structure.function[row])
    while call >= 0:
        found.append(call)
        above = int(calls.parent[call])
        call = int(structure.function[above]) if above >= 0 else -1
    return found
