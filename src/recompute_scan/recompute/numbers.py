"""Autograd's sequence numbers, which lead from a node to the operator that made it.

Every operator that runs with gradients on has the number of the node that it makes, with one
exception: before torch 2.4 none has under a Python dispatch mode (a selective checkpoint's, a
FLOP counter's), where the key that it is first called with is no key of autograd's
(``Dispatcher::callWithDispatchKeySlowPath``). The nodes have their numbers all the same, and in
the order of their operators; so a node whose number no operator has belongs to one of its name
between those of the numbers before and after it.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from recompute_scan.arrays import among, distinct
from recompute_scan.model import Calls
from recompute_scan.recompute import vocabulary as words
from recompute_scan.trace.columns import Bool, Int32, Int64, Ints, Kind

_NONE = np.empty(0, np.int64)


def numbers_of(calls: Calls, operators: Bool, engine: Int32, nodes: Int64) -> tuple[Ints, Int64]:
    """The sequence number of each call, -1 for none; and rows of those that got their node's.

    That of an operator without one (TorchScript) is the lowest inside it, that of an engine range
    its node's.

    Args:
        calls: The calls.
        operators: For each: is it an outermost operator of forward work, or of a recompute?
        engine: Row of the engine range that holds each, or -1.
        nodes: Rows of the nodes.
    """
    own = calls.sequence.copy()
    nodes = nodes[calls.sequence[nodes] >= 0]
    told = _fill_in(calls, own, operators & (engine < 0), engine, nodes)
    none = np.iinfo(own.dtype).max
    lowest = np.where(own < 0, none, own)
    for rows in calls.levels_up():
        np.minimum.at(lowest, calls.parent[rows], lowest[rows])
    number: Ints = own.copy()
    np.copyto(number, lowest, where=operators & (own < 0) & (lowest < none))
    # A node with tensor hooks (FSDP's, say) has its number while its engine range has none, or
    # that of another node.
    number[engine[nodes]] = calls.sequence[nodes]
    return number, told


def under_a_mode(calls: Calls, rows: Int64) -> Bool:
    """For each of these operators: does it, or one inside it, hold a call of its own name?

    A dispatch mode sees an operator, and calls it again.
    """
    child = np.flatnonzero((calls.parent >= 0) & (calls.kind == Kind.OP))
    echo = np.zeros(len(calls) + 1, np.int64)
    echo[child + 1] = calls.name[child] == calls.name[calls.parent[child]]
    before = np.cumsum(echo)
    return np.asarray(before[rows + 1 + calls.size[rows]] > before[rows + 1])


def _fill_in(calls: Calls, number: Ints, forward: Bool, engine: Int32, nodes: Int64) -> Int64:
    """Give operators of the forward pass the numbers of the nodes that they made, in place."""
    numbered = np.flatnonzero((engine < 0) & (number >= 0) & (calls.kind == Kind.OP))
    unnumbered = np.flatnonzero(forward & (number < 0))
    if not len(unnumbered) or not len(numbered):
        return _NONE
    orphans = nodes[~among(number[nodes], number[numbered])]
    if not len(orphans):
        return _NONE
    unnumbered = unnumbered[under_a_mode(calls, unnumbered)]
    if not len(unnumbered):
        return _NONE
    orphans = orphans[np.unique(number[orphans], return_index=True)[1]]
    numbered = numbered[np.argsort(number[numbered], kind="stable")]
    at = np.searchsorted(number[numbered], number[orphans])
    first = np.where(at > 0, numbered[at - 1], -1)
    until = np.append(numbered, len(calls))[at]
    makers = _by_operator(calls, unnumbered)
    codes = calls.name[orphans]
    rows_of = {
        code: makers.get(words.plain(calls.names[code].partition("Backward")[0]), _NONE).tolist()
        for code in distinct(codes).tolist()
    }
    told, place = [], 0
    found = zip(orphans.tolist(), codes.tolist(), first.tolist(), until.tolist(), strict=True)
    for node, code, begin, end in found:
        rows, place = rows_of[code], max(place, begin + 1)
        here = bisect_left(rows, place)
        if here < len(rows) and rows[here] < end:
            maker = rows[here]
            number[maker] = number[node]
            place = maker + 1 + int(calls.size[maker])
            told.append(maker)
    return np.array(told, np.int64)


def _by_operator(calls: Calls, rows: Int64) -> dict[str, Int64]:
    """Rows of these calls and of all inside them, in order, by what their nodes are called."""
    inside = np.flatnonzero(calls.within(rows))
    codes = calls.name[inside]
    found: dict[str, Int64] = {}
    for code in distinct(codes).tolist():
        operator = words.plain(calls.names[code])
        same = np.concatenate([found.get(operator, _NONE), inside[codes == code]])
        found[operator] = np.sort(same)
    return found
