"""Finding the forward pass again inside the backward pass: the proof that a call is a recompute.

Each node's operators where a recompute can be (candidates) form one sequence, which
:mod:`recompute_scan.recompute.sequences` matches. Operators that fit nowhere in the forward pass
are no recompute and are returned as unexplained.

A checkpoint function may store its input in another form or place before it runs its block, or
after it. Its node runs the block again, but not that work: the operators directly in the function's
call and outside what its node repeats with gradients on (:func:`find_own_work`). A checkpoint
around the function repeats it. torch's function does no such work.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.evaluations import twins_of
from recompute_scan.recompute.roles import AGAIN, Role, Structure, Work
from recompute_scan.recompute.sequences import Matcher, Recompute
from recompute_scan.trace.calls import Calls
from recompute_scan.trace.columns import Bool, Int64, Kind


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
    recomputes = _with_work(matches, structure, _Ran(calls, work, neutral))
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
    hooked = [each.by_design and not structure.checkpoint_node[each.engine] for each in recomputes]
    if not any(hooked):
        return recomputes
    own, _ = matcher.anchors.count_passes(())

    def looks(each: Recompute) -> bool:
        gone_through = own[matcher.forward.searchsorted(each.original)] > 0
        return bool(2 * np.count_nonzero(gone_through) > len(each.original))

    both = zip(recomputes, hooked, strict=True)
    return tuple(each for each, by_hook in both if not (by_hook and looks(each)))


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


def _with_work(found: list[Recompute], structure: Structure, ran: _Ran) -> tuple[Recompute, ...]:
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


class _Ran:
    """Tells whether an operator of a recompute did the work of its first run.

    Early stop interrupts the last operator of a recompute; selective checkpointing returns saved
    results. ``neutral`` calls are bookkeeping that costs nothing.
    """

    def __init__(self, calls: Calls, work: Work, neutral: Bool) -> None:
        self._calls = calls
        self._work = work
        self._neutral = neutral

    def of(self, original: Int64, again: Int64, ends: Int64, whole: Bool) -> Bool:
        """For each operator of all recomputes: did it?

        Args:
            original: Rows of first runs.
            again: Rows of the same operators' second runs.
            ends: For each recompute, where its last operator is in these.
            whole: For each recompute: early stop cannot have cut it.
        """
        both = np.concatenate((original, again))
        twin = twins_of(self._calls)
        first_twins, twins = np.split(self._calls.holding(twin & ~self._neutral, both), 2)
        ran = np.asarray(twins >= first_twins)
        if not ran.all():  # selective checkpoints alone have twins
            ran |= self._without_mode(twin, both, ends)
        if self._work.on_gpu:
            kernels = self._work.kernels
            return np.asarray(ran & ((kernels[original] == 0) | (kernels[again] > 0)))
        name = self._calls.name
        last, first_run = again[ends], original[ends]
        for at in np.flatnonzero(~whole & (name[last] == name[first_run])):
            ran[ends[at]] &= self._ended(int(last[at]), int(first_run[at]))
        return ran

    def _without_mode(self, twin: Bool, both: Int64, ends: Int64) -> Bool:
        """For each operator: does its recompute run all that the first run did, and no mode?

        A reentrant checkpoint inside a selective one goes through its block once more by itself.
        Some operator has to show it: a saved one without operators inside looks the same.
        """
        calls = self._calls
        first_twins, twins = np.split(calls.holding(twin, both), 2)
        # The mode detaches what it keeps, and so do the hooks of saved tensors.
        operator = (calls.kind == Kind.OP) & ~calls.where(vocabulary.DISPATCH_MODE.__eq__)
        operator &= ~self._neutral
        first, again = np.split(calls.holding(operator, both), 2)
        lengths = np.diff(ends, prepend=-1)
        whole = again >= first - first_twins
        whole[ends[lengths > 1]] = True  # early stop may have cut it
        number = np.arange(len(ends)).repeat(lengths)
        lacking = np.bincount(number, weights=twins + ~whole, minlength=len(ends))
        shown = np.bincount(number, (first > first_twins) & (again > 0), minlength=len(ends))
        return np.asarray(((lacking == 0) & (shown > 0))[number])

    def _ended(self, last: int, first_run: int) -> bool:
        """Did the last operator of a recompute do half the work of its first run, or more?

        Early stop interrupts the last operator inside it. ``aten::gru`` has hundreds.
        """
        done, whole = self._innermost(last), self._innermost(first_run)
        return done >= whole or 2 * (done - 1) >= whole

    def _innermost(self, row: int) -> int:
        """Operators inside this call with none in them.

        A recompute detaches, inside its operators, what it recomputed: that does not count.
        """
        stop = row + 1 + self._calls.size[row]
        counted = row + 1 + np.flatnonzero(~self._neutral[row + 1 : stop])
        following = np.append(counted[1:], stop)
        return int(np.count_nonzero(following > counted + self._calls.size[counted]))
