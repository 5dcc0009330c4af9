"""The plain count: forward operators by name, inside the backward pass and outside.

It asks nothing of the match with the forward pass: not which call is in which, not what
follows what, and no shapes. An operator that only a forward pass has (attention, ``linear``, a
convolution, a norm) is counted by its name, and lies inside the backward pass where its start
lies in the time of one of the engine's ranges on the same thread. What the match found has to
come to the same two numbers; where it does not, one of the two is wrong.

What runs without gradients is no training forward pass, or a formula's own, and is left out, but
for what the call of an autograd function holds: a reentrant checkpoint runs its block so. What
runs in the backward pass but in no node is a gradient hook's, and counted apart. A loss that works
out its gradient in chunks runs them again in its own formula: that is left out, too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec import Struct

from recompute_scan.model import Calls
from recompute_scan.nesting import nest_intervals
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.align import Alignment
from recompute_scan.recompute.roles import Structure
from recompute_scan.trace.columns import Bool, Int64, Ints, Kind, Trace

# Counts may differ by this share of the forward pass's, and by one operator.
_TOLERANCE = 0.02
_STRAY = 1
# With more than this share of the forward pass's unexplained there is no verdict.
_CONTRADICTS = 0.1


class Tally(Struct, frozen=True):
    """One name of operators over the whole trace.

    Attributes:
        name: The operator.
        outside: How many ran outside any backward pass.
        inside: How many ran inside one, those of hooks among them.
        hooked: How many of these a gradient hook ran.
        forward: How many of the match's forward operators they make up.
        again: How many of those that the match says ran again.
    """

    name: str
    outside: int
    inside: int
    hooked: int
    forward: int
    again: int

    @property
    def agrees(self) -> bool:
        """Do both counts come to the same, outside and inside?"""
        return self._alike(self.inside, self.again) and self._alike(self.outside, self.forward)

    @property
    def unexplained(self) -> int:
        """How many more, or fewer, ran inside than the match and hooks explain."""
        return max(0, self.inside - self.again - self.hooked, self.again - self.inside)

    @property
    def contradicts(self) -> bool:
        """Is more left unexplained than stray calls could be?"""
        return self.unexplained > max(_STRAY, _CONTRADICTS * self.outside)

    def _alike(self, one: int, other: int) -> bool:
        return abs(one - other) <= max(_STRAY, _TOLERANCE * max(self.outside, self.inside))


class PlainCounts(Struct, frozen=True):
    """Every name counted, attention first; empty where the trace has no such operator."""

    tallies: tuple[Tally, ...]

    @property
    def agrees(self) -> bool | None:
        """Does every name agree? ``None`` where there is nothing to count."""
        return all(tally.agrees for tally in self.tallies) if self.tallies else None

    @property
    def contradicting(self) -> Tally | None:
        """The most telling name of which too much is left without an explanation."""
        return next((tally for tally in self.tallies if tally.contradicts), None)


def count_plainly(
    trace: Trace, calls: Calls, structure: Structure, alignment: Alignment
) -> PlainCounts:
    """The plain count beside that of the match; see :class:`PlainCounts`."""
    rows = _named(trace, words.forward_only)
    if not len(rows):
        rows = _named(trace, words.light_forward)
    engines, nodes = _backward_ranges(trace)
    losses = words.nodes_of(structure.functions.losses)
    formula = np.array([name in losses for name in trace.names], np.bool_)
    formulas = np.flatnonzero(formula[trace.name] & (trace.kind == Kind.OP))
    inside = _lie_in(trace, rows, engines)
    counted = _with_gradients(trace, rows, inside) & ~_lie_in(trace, rows, formulas)
    rows, inside = rows[counted], inside[counted]
    hooked = inside & ~_lie_deepest_in(trace, rows, nodes, engines)
    forward, again = _matched(trace, calls, structure, alignment, rows)

    def per_name(weights: Ints | Bool) -> list[int]:
        counts = np.bincount(trace.name[rows], weights=weights, minlength=len(trace.names))
        found: list[int] = counts.astype(np.int64).tolist()
        return found

    columns = [per_name(column) for column in (~inside, inside, hooked, forward, again)]
    tallies = [
        Tally(trace.names[code], *(column[code] for column in columns))
        for code in np.unique(trace.name[rows]).tolist()
    ]
    return PlainCounts(tuple(sorted(tallies, key=_most_telling)))


def _named(trace: Trace, wanted: Callable[[str], bool]) -> Int64:
    names = np.array([wanted(name) for name in trace.names], np.bool_)
    return np.flatnonzero(names[trace.name] & (trace.kind == Kind.OP))


def _most_telling(tally: Tally) -> tuple[bool, bool, int, str]:
    attention = words.family_of(tally.name)[1] == "attention"
    inner = tally.name.rpartition("::")[2].startswith("_")
    return not attention, inner, -tally.outside, tally.name


def _with_gradients(trace: Trace, rows: Int64, inside: Bool) -> Bool:
    """For each row: did it run with gradients on, or for a function that has a node?

    An operator inside one with a number has none of its own: a convolution's kernels are called by
    such a one, and by the formula of a gradient's gradient, which has no number. Under a dispatch
    mode torch before 2.4 gives out no numbers. A name most of which has none in the forward pass is
    taken whole.

    Args:
        trace: The trace.
        rows: The rows.
        inside: Whether each starts within the backward pass.
    """
    given = rows[trace.sequence[rows] >= 0]
    numbered = _lie_in(trace, rows, given) | _lie_in(trace, rows, _custom_calls(trace))
    outside = ~inside
    size = len(trace.names)
    every = np.bincount(trace.name[rows[outside]], minlength=size)
    known = np.bincount(trace.name[rows[outside & numbered]], minlength=size)
    return np.asarray(numbered | (2 * known < every)[trace.name[rows]])


def _custom_calls(trace: Trace) -> Int64:
    """Rows of the calls of autograd functions: what has a node of its own name."""
    names = set(trace.names)
    custom = np.array([f"{name}Backward" in names for name in trace.names], np.bool_)
    return np.flatnonzero(custom[trace.name] & (trace.kind == Kind.OP))


def _backward_ranges(trace: Trace) -> tuple[Int64, Int64]:
    """Rows of the engine's ranges, and of the nodes in them that ask for saved tensors."""
    engine = np.array([name.startswith(words.ENGINE) for name in trace.names], np.bool_)
    evaluated = {name.removeprefix(words.ENGINE) for name in trace.names if words.ENGINE in name}
    evaluated.discard(words.ACCUMULATE_GRAD.removeprefix(words.ENGINE))
    node = np.array([name in evaluated for name in trace.names], np.bool_)
    if not engine.any():
        engine = node = np.array([bool(words.BARE_NODE.match(name)) for name in trace.names])
    operator = trace.kind == Kind.OP
    return (
        np.flatnonzero(engine[trace.name] & operator),
        np.flatnonzero(node[trace.name] & operator),
    )


def _lie_in(trace: Trace, rows: Int64, ranges: Int64) -> Bool:
    """For each row: does it start within one of these ranges of its thread?"""
    inside = np.zeros(len(rows), np.bool_)
    for thread in np.unique(trace.thread[ranges]).tolist():
        mine = ranges[trace.thread[ranges] == thread]
        mine = mine[trace.ts[mine].argsort(kind="stable")]
        begin = trace.ts[mine]
        until = np.maximum.accumulate(begin + trace.dur[mine])
        own = np.flatnonzero(trace.thread[rows] == thread)
        at = begin.searchsorted(trace.ts[rows[own]], side="right") - 1
        inside[own] = (at >= 0) & (trace.ts[rows[own]] < until[np.maximum(at, 0)])
    return inside


def _lie_deepest_in(trace: Trace, rows: Int64, nodes: Int64, engines: Int64) -> Bool:
    """For each row: of these ranges that hold it, is the innermost a node?"""
    ranges = np.unique(np.concatenate([nodes, engines]))
    events = np.concatenate([ranges, rows])
    start, end = trace.ts[events], trace.ts[events] + trace.dur[events]
    end[len(ranges) :] = start[len(ranges) :]  # operators as points hold nothing
    order = np.lexsort((np.arange(len(events)), start - end, start, trace.thread[events]))
    _, parent, _, _ = nest_intervals(trace.thread[events[order]], start[order], end[order])
    place = np.empty(len(events), np.int64)
    place[order] = np.arange(len(events))
    holder = parent[place[len(ranges) :]]
    node = np.zeros(len(trace) + 1, np.bool_)
    node[nodes] = True
    return np.where(holder >= 0, node[events[order][holder]], False)


def _matched(
    trace: Trace, calls: Calls, structure: Structure, alignment: Alignment, rows: Int64
) -> tuple[Int64, Int64]:
    """For each of these events: is it part of the match's forward pass; and how often of what it
    says ran again.
    """
    top = np.full(len(trace), -1, np.int64)
    top[calls.event] = structure.top
    tops = top[rows]
    part = np.zeros(len(calls) + 1, np.int64)
    part[alignment.forward] = 1
    times = np.zeros(len(calls) + 1, np.int64)
    np.add.at(times, alignment.again, 1)
    return part[tops], times[tops]  # the last entry is that of no operator: -1
