"""Operators that ran again in the backward pass, and how often: the proof of each recompute.

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

from recompute_scan.numpy_tools import changes, medians_of, split, turns_of
from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.evaluations import twins_of
from recompute_scan.recompute.roles import AGAIN, OperatorCodes, Role, Structure, Work
from recompute_scan.recompute.sequences import Matcher, Recompute, alike
from recompute_scan.trace.calls import Calls, StepSpan, step_of
from recompute_scan.trace.columns import Bool, Float64, Int64, Kind


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
    recomputes = _Ran(structure, work, neutral).of(matches)
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

    found = []
    for each, by_hook in zip(recomputes, hooked, strict=True):
        if by_hook:
            gone_through = own[matcher.forward.searchsorted(each.original)] > 0
            if 2 * np.count_nonzero(gone_through) > len(each.original):
                continue
        found.append(each)
    return tuple(found)


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

    def __init__(self, structure: Structure, work: Work, neutral: Bool) -> None:
        self._calls, self._structure = structure.calls, structure
        self._work = work
        self._neutral = neutral

    def of(self, found: list[Recompute]) -> tuple[Recompute, ...]:
        """The recomputes, with what of each really ran."""
        if not found:
            return ()
        original = np.concatenate([each.original for each in found])
        again = np.concatenate([each.again for each in found])
        both = np.concatenate((original, again))
        # For each recompute: where its last operator is in these.
        ends = np.cumsum([len(each.again) for each in found]) - 1
        twin = twins_of(self._calls)
        first_twins, twins = np.split(self._calls.holding(twin & ~self._neutral, both), 2)
        ran = np.asarray(twins >= first_twins)
        if not ran.all():  # selective checkpoints alone have twins
            ran |= self._without_mode(twin, both, ends)
        if self._work.on_gpu:
            kernels = self._work.kernels
            ran &= (kernels[original] == 0) | (kernels[again] > 0)
        else:
            name, last, first_run = self._calls.name, again[ends], original[ends]
            # Only a non-reentrant recompute stops early, and not inside a function that it runs
            # again.
            whole = self._structure.checkpoint_node[[each.engine for each in found]]
            inside = np.split(self._structure.function[again] >= 0, ends[:-1] + 1)
            whole |= np.array([2 * one.sum() > len(one) for one in inside], np.bool_)
            for at in np.flatnonzero(~whole & (name[last] == name[first_run])):
                ran[ends[at]] &= self._ended(int(last[at]), int(first_run[at]))
        parts = np.split(ran, ends[:-1] + 1)
        return tuple(replace(each, ran=part) for each, part in zip(found, parts, strict=True))

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
        """Did the last operator of a recompute do more than half the work of its first run?

        Early stop interrupts the last operator inside it. ``aten::gru`` has hundreds.
        """
        done, whole = self._innermost(last), self._innermost(first_run)
        return done >= whole or 2 * (done - 1) > whole

    def _innermost(self, row: int) -> int:
        """Operators inside this call with none in them.

        A recompute detaches, inside its operators, what it recomputed: that does not count.
        """
        stop = row + 1 + self._calls.size[row]
        counted = row + 1 + np.flatnonzero(~self._neutral[row + 1 : stop])
        following = np.append(counted[1:], stop)
        return int(np.count_nonzero(following > counted + self._calls.size[counted]))


# An m matters when at least this share of forward time, or of a block's, has it; one up to 1 also
# where so many operators have it, as another that waited for the machine may outlast them all.
MATTERS, MANY = 0.01, 0.1


class Counts(Struct, frozen=True):
    """One entry per forward operator, in the order of ``Alignment.forward``.

    Attributes:
        rows: Row of the operator in the calls.
        m: How often checkpoints ran it again per backward pass.
        runs: How often checkpoints ran it again, in all.
        designed: How often functions or the model did, without a checkpoint.
        weight: Time that it typically takes, ns (on the device; see ``Work.time``): the median
            over forward operators of the same name, shapes and types. A single run can be
            slow for unrelated reasons: a page fault, a lazy start, another process. Of graphs
            without a trace, ``Partition.costs``.
        recompute_ns: Time of all its recomputes, gaps between operators included on a CPU.
        redundant_ns: The part of it beyond the first recompute per backward pass.
        counted: Whether it has a backward, in a complete step.
        step: Position of its step in the list of steps, -1 outside any.
        batch: Number of its forward pass.
        flight: Number of the forward passes that are held at once, as a pipeline schedule does:
            one more after each backward pass.
        redundant_rows: Rows of the recomputed operators beyond the first per backward pass.
        operators: Names of the operators, where they differ from the calls': several entries
            can be of one call, which compiled code makes of several operators.
    """

    rows: Int64
    m: Float64
    runs: Int64
    designed: Int64
    weight: Float64
    recompute_ns: Float64
    redundant_ns: Float64
    counted: Bool
    step: Int64
    batch: Int64
    flight: Int64
    redundant_rows: Int64
    operators: tuple[str, ...] | None = None

    def names(self, calls: Calls, places: slice) -> list[str]:
        """Names of the operators at these places."""
        if self.operators is not None:
            return list(self.operators[places])
        return [calls.names[code] for code in calls.name[self.rows[places]].tolist()]

    def highest(self, among: Bool | Int64 | slice) -> float:
        """The highest m that ``MATTERS`` of these operators' time or, up to 1, ``MANY`` have."""
        m, weight = self.m[among], self.weight[among]
        enough = MATTERS * weight.sum()
        for value in np.unique(m)[::-1].tolist():
            some = m >= value
            if weight[some].sum() >= enough or (value <= 1 and some.mean() >= MANY):
                return float(value)
        return 0.0

    def passes(self, among: slice) -> float:
        """Most backward passes that recomputed one of these operators, at least 1."""
        most = self.m[among].max(initial=0.0)
        return max(1.0, float(self.runs[among].max(initial=0) / most)) if most else 1.0

    def mean(self, among: Bool | Int64) -> float:
        """Time-weighted mean m of these operators."""
        weight, m = self.weight[among], self.m[among]
        if not weight.sum():
            return float(m.mean()) if len(weight) else 0.0
        return float((m * weight).sum() / weight.sum())


def count(work: Work, alignment: Alignment, steps: list[StepSpan], complete: Bool) -> Counts:
    """Count the recomputes of each forward operator."""
    calls = alignment.structure.calls
    rows = alignment.forward
    passes = alignment.passes
    places, shares = alignment.places, _shares(work, alignment)
    checkpoints = np.flatnonzero(~alignment.by_design)
    asked = places[checkpoints]
    beyond = checkpoints[turns_of(asked) >= passes[asked]]
    runs, designed = (
        np.bincount(places[alignment.ran & ~alignment.piece & which], minlength=len(rows))
        for which in (~alignment.by_design, alignment.by_design)
    )
    recompute_ns, redundant_ns = np.zeros((2, len(rows)))
    np.add.at(recompute_ns, places, shares)
    np.add.at(redundant_ns, places[beyond], shares[beyond])
    step = step_of(steps, calls.start[rows])
    landed = _backwards_ends(alignment)
    flight = landed.searchsorted(calls.start[rows], side="right")
    begun = np.sort(np.concatenate([landed, _between_micro_batches(alignment, flight)]))
    return Counts(
        rows=rows,
        m=runs / passes,
        runs=runs,
        designed=designed,
        weight=medians_of(work.time[rows], calls.dims[rows], calls.name[rows])[0],
        recompute_ns=recompute_ns,
        redundant_ns=redundant_ns,
        counted=(alignment.backwards > 0) & np.append(complete, False)[step],
        step=step,
        batch=begun.searchsorted(calls.start[rows], side="right"),
        flight=flight,
        redundant_rows=np.sort(alignment.again[beyond]),
    )


def join_steps(structure: Structure, steps: list[StepSpan]) -> list[StepSpan]:
    """The steps, with those joined that several optimizers cut out of one training step.

    Where optimizer steps alone mark the steps, several may belong to one: they follow each
    other without a backward pass between them, or are inside one backward pass, as gradient
    hooks run them.
    """
    calls = structure.calls
    backward = structure.rows(Role.BACKWARD)
    if not len(backward):
        return steps
    backward = backward[calls.start[backward].argsort(kind="stable")]
    begins, ends = calls.start[backward], np.maximum.accumulate(calls.end[backward])
    forward = np.sort(calls.start[(structure.role == Role.FORWARD) & (structure.number >= 0)])
    optimizer = set(calls.end[structure.rows(Role.OPTIMIZER)].tolist())
    joined = steps[:1]
    for step in steps[1:]:
        last = joined[-1]
        at = int(begins.searchsorted(last.end)) - 1
        times = forward if at >= 0 and ends[at] >= last.end else begins
        apart = times.searchsorted(last.end) < times.searchsorted(step.end)
        if last.end not in optimizer:
            joined.append(step)
        elif apart:
            joined.append(replace(step, index=last.index + 1))
        else:
            joined[-1] = replace(last, end=step.end)
    return joined


def complete_steps(alignment: Alignment, steps: list[StepSpan], cut_at: int | None = None) -> Bool:
    """For each step: does it hold a forward pass with its backward, and was it read to its end?

    A trace that was cut short ends at ``cut_at``, ns. A step's own range can be in the file before
    all that ran in it.
    """
    step = step_of(
        steps, alignment.structure.calls.start[alignment.forward[alignment.backwards > 0]]
    )
    trained = np.bincount(step[step >= 0], minlength=len(steps)) > 0
    return trained & np.array([cut_at is None or span.end <= cut_at for span in steps], np.bool_)


def _shares(work: Work, alignment: Alignment) -> Float64:
    """Time of each operator of all recomputes; on a CPU the gaps between them are shared out."""
    again, begins = alignment.again, alignment.begins
    time: Float64 = work.time[again].astype(np.float64)
    if work.on_gpu:
        return time
    total = np.add.reduceat(time, begins)
    factor = np.ones(len(begins))
    np.divide(host_times(alignment), total, out=factor, where=total > 0)
    time *= np.repeat(np.maximum(factor, 1.0), np.diff(begins, append=len(again)))
    return time


def host_times(alignment: Alignment) -> Int64:
    """Time from the first to the last operator of each recompute on the host, ns, without the
    backward passes between: a function that runs its block in pieces runs backward through each.
    """
    calls, table = alignment.structure.calls, alignment.structure.evaluations
    again, begins = alignment.again, alignment.begins
    first = np.minimum.reduceat(calls.start[again], begins)
    last = np.maximum.reduceat(calls.end[again], begins)
    nested = np.flatnonzero(table.parent >= 0)
    rows, around = table.row[nested], table.row[table.parent[nested]]
    moments = np.sort(calls.start[rows])

    def key(engine: Int64, moment: Int64) -> Int64:
        found: Int64 = engine * (len(rows) + 1) + moments.searchsorted(moment)
        return found

    keys = key(around, calls.start[rows])
    order = keys.argsort(kind="stable")
    passed = np.concatenate(([0], calls.duration[rows[order]].cumsum()))
    engine = np.array([each.engine for each in alignment.recomputes], np.int64)
    from_, until = keys[order].searchsorted((key(engine, first), key(engine, last)))
    times: Int64 = np.maximum(0, last - first - (passed[until] - passed[from_]))
    return times


def _backwards_ends(alignment: Alignment) -> Int64:
    """When each row of backward passes had ended, and a forward pass began, ns."""
    calls, roots = alignment.structure.calls, alignment.structure.roots
    trained = alignment.forward[alignment.backwards > 0]
    rows = np.concatenate([trained, roots])
    order = calls.start[rows].argsort(kind="stable")
    is_backward = order >= len(trained)
    begins = ~is_backward[1:] & is_backward[:-1]
    # From the end of that pass: what a forward pass does first may have no gradient.
    return np.asarray(calls.end[rows[order]][:-1][begins])


def _between_micro_batches(alignment: Alignment, flight: Int64) -> Int64:
    """When a forward pass had ended and another began with no backward pass between, ns.

    The other runs alike operators, and its own backward pass goes through them.
    """
    calls, forward, through = alignment.structure.calls, alignment.forward, alignment.through
    code = OperatorCodes(calls)[forward]
    trained = np.flatnonzero(through >= 0)
    trained = trained[calls.start[forward[trained]].argsort(kind="stable")]
    begins = np.flatnonzero(changes(flight[trained], through[trained]))
    times = []
    held: dict[int, Int64] = {}
    last = trained[:1]
    pieces = split(trained, begins) if len(trained) else []
    # A pass that goes on after this piece has not ended before it.
    ends = {(int(flight[one[0]]), int(through[one[0]])): at for at, one in enumerate(pieces)}
    for at, piece in enumerate(pieces):
        own, kinds = int(through[piece[0]]), code[piece]
        if flight[piece[0]] != flight[last[-1]]:
            held = {}
        elif (
            own not in held
            and all(ends[int(flight[piece[0]]), one] < at for one in held)
            and any(alike(kinds, other) for other in held.values())
        ):
            times.append(int(calls.end[forward[last[-1]]]))
            held = {}
        held.setdefault(own, kinds)
        last = piece
    return np.array(times, np.int64)
