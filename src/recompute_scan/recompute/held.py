"""Runs that one call makes in the backward pass, and that the node of another goes through.

A function need not run its block again in its own node: a gradient hook may do that before, or the
node of a second function (pipelines have it run before the gradient is there). What tells such a
run from what a hook looks at is that the nodes that it makes run: a backward pass inside the
function's node goes through them. Where one call makes a run and goes through it, that is its own
affair.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from recompute_scan.arrays import among, changes, true_at
from recompute_scan.model import Calls
from recompute_scan.recompute import vocabulary as words
from recompute_scan.trace.columns import Bool, Int64, Kind


class HeldRuns(Struct, frozen=True):
    """Operators of such runs, those outside others, in order.

    Attributes:
        rows: Their rows.
        makers: Row of the node, or of the engine range with the hook, that ran each.
        nodes: Row of the node that goes through each.
    """

    rows: Int64
    makers: Int64
    nodes: Int64


def find_held_runs(calls: Calls, engine: Bool) -> HeldRuns:
    """The runs.

    Args:
        calls: The trace's calls.
        engine: For each name: is it the engine's range around a node, or a bare node?
    """
    operator = calls.kind == Kind.OP
    around = {one[len(words.ENGINE) :] for one in calls.names if one.startswith(words.ENGINE)}
    node = np.array([name in around for name in calls.names], np.bool_)
    # A node with hooks has its number while its engine range has none.
    own = true_at(node[calls.name] & operator & (calls.parent >= 0) & (calls.sequence >= 0))
    own = own[engine[calls.name[calls.parent[own]]]]
    started = operators_around(calls, calls.parent[own].astype(np.int64))
    nested = true_at(started >= 0)
    nested = nested[node[calls.name[started[nested]]]]
    numbers, first = np.unique(calls.sequence[own[nested]], return_index=True)
    own, goes = own[nested[first]], started[nested[first]]
    rows = true_at(operator & ~(engine | node)[calls.name])
    rows = rows[among(calls.sequence[rows], numbers)]
    at = numbers.searchsorted(calls.sequence[rows])
    before = calls.end[rows] <= calls.start[own[at]]
    rows = _last_of_equal(calls, rows[before])
    nodes = goes[numbers.searchsorted(calls.sequence[rows])]
    makers = operators_around(calls, rows)
    inside = (makers >= 0) & (engine | node)[calls.name[makers]] & (makers != nodes)
    inside &= calls.end[rows] <= calls.start[nodes]
    return HeldRuns(rows[inside], makers[inside], nodes[inside])


def _last_of_equal(calls: Calls, rows: Int64) -> Int64:
    """Of these operators, those that made the nodes of their numbers, in order.

    What makes no node bears the number of the next that does, and what an operator calls that of
    the operator: of equal ones the last made it.
    """
    number, above = calls.sequence[rows], calls.parent[rows]
    outside = true_at((above < 0) | (calls.sequence[above] != number))
    order = outside[np.lexsort((-calls.start[rows[outside]], number[outside]))]
    return np.sort(rows[order[changes(number[order])]])


def operators_around(calls: Calls, rows: Int64) -> Int64:
    """Row of the innermost operator that holds each of these, looking through annotations; or -1.

    Each row's own is the first operator above it.
    """
    around: Int64 = calls.parent[rows].astype(np.int64)
    while True:
        through = true_at((around >= 0) & (calls.kind[around] == Kind.ANNOTATION))
        if not len(through):
            return around
        around[through] = calls.parent[around[through]]
