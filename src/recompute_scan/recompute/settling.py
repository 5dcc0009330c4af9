"""What becomes of calls whose place alone does not say what they are, and autograd's numbers.

Every operator that runs with gradients on has the number of the node that it makes, with one
exception: before torch 2.4 none has under a Python dispatch mode (a selective checkpoint's, a
FLOP counter's), where the key that it is first called with is no key of autograd's
(``Dispatcher::callWithDispatchKeySlowPath``). The nodes have their numbers all the same, and in
the order of their operators; so a node whose number no operator has belongs to one of its name
between those of the numbers before and after it.

By place, an operator in the backward pass could be one. Whose it is tells what ran around it: its
node's formula, a gradient hook, another function's gradient, an optimizer's update behind its
closure. Each ``settle_`` function changes ``role``, one entry per call, in place.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from recompute_scan.arrays import among, distinct, true_at
from recompute_scan.model import Calls
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.functions import CheckpointFunctions
from recompute_scan.recompute.held import HeldRuns
from recompute_scan.recompute.roles import Role, table
from recompute_scan.trace.columns import Bool, Int8, Int32, Int64, Ints, Kind

_RECOMPUTED = table(Role.CANDIDATE, Role.RANGE)
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


def _under_a_mode(calls: Calls, rows: Int64) -> Bool:
    """For each of these operators: does it, or one inside it, hold a call of its own name?

    A dispatch mode sees an operator, and calls it again.
    """
    child = true_at((calls.parent >= 0) & (calls.kind == Kind.OP))
    echo = np.zeros(len(calls) + 1, np.int64)
    echo[child + 1] = calls.name[child] == calls.name[calls.parent[child]]
    before = echo.cumsum()
    return np.asarray(before[rows + 1 + calls.size[rows]] > before[rows + 1])


def _fill_in(calls: Calls, number: Ints, forward: Bool, engine: Int32, nodes: Int64) -> Int64:
    """Give operators of the forward pass the numbers of the nodes that they made, in place."""
    numbered = true_at((engine < 0) & (number >= 0) & (calls.kind == Kind.OP))
    unnumbered = true_at(forward & (number < 0))
    if not len(unnumbered) or not len(numbered):
        return _NONE
    orphans = nodes[~among(number[nodes], number[numbered])]
    if not len(orphans):
        return _NONE
    unnumbered = unnumbered[_under_a_mode(calls, unnumbered)]
    if not len(unnumbered):
        return _NONE
    orphans = orphans[np.unique(number[orphans], return_index=True)[1]]
    numbered = numbered[number[numbered].argsort(kind="stable")]
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
    inside = true_at(calls.within(rows))
    codes = calls.name[inside]
    found: dict[str, Int64] = {}
    for code in distinct(codes).tolist():
        operator = words.plain(calls.names[code])
        same = np.concatenate([found.get(operator, _NONE), inside[codes == code]])
        found[operator] = np.sort(same)
    return found


def settle_updates(calls: Calls, role: Int8, closures: Int64) -> None:
    """Turn what follows the closure in an optimizer's range into OPTIMIZER, in place."""
    engines = true_at(role == Role.BACKWARD)
    for row in closures.tolist():
        inside = np.arange(row + 1, row + 1 + calls.size[row])
        # On a GPU the backward pass runs in another thread, and the closure waits for it.
        began = calls.start[engines]
        within = engines[(began >= calls.start[row]) & (began < calls.end[row])]
        last = inside[(calls.sequence[inside] >= 0) & (calls.kind[inside] == Kind.OP)]
        update = max(calls.end[within].max(initial=0), calls.end[last].max(initial=0))
        after = inside[(role[inside] == Role.FORWARD) & (calls.start[inside] >= update)]
        role[after] = Role.OPTIMIZER


def _unheld(calls: Calls, role: Int8, owner: Int32, held: HeldRuns) -> Int64:
    """Rows of the candidates that some call ran by itself, and not for another node."""
    end = np.full(len(calls), -1, np.int64)
    np.maximum.at(end, held.makers, calls.end[held.rows])
    rows = true_at((role == Role.CANDIDATE) & (owner >= 0))
    return rows[calls.start[rows] >= end[owner[rows]]]


def settle_hooks(
    calls: Calls, role: Int8, engine: Int32, owner: Int32, node: Bool, held: HeldRuns
) -> None:
    """Turn candidates that a gradient hook ran into FORMULA, in place."""
    holds_node = np.zeros(len(calls), np.bool_)
    holds_node[engine[node]] = True
    accumulates = np.array([name == words.ACCUMULATE_GRAD for name in calls.names], np.bool_)
    candidates = _unheld(calls, role, owner, held)
    around = engine[candidates]
    hooked = (owner[candidates] == around) & holds_node[around]
    role[candidates[hooked | accumulates[calls.name[around]]]] = Role.FORMULA


def settle_formulas(calls: Calls, role: Int8, owner: Int32, number: Ints, told: Int64) -> None:
    """Turn candidates that belong to a node's own formula into FORMULA, in place.

    A recompute comes before the formula that asked for it, so whatever starts after the last
    operator with a sequence number of its own is formula. Where a dispatch mode left the operators
    of the forward pass without one, it is the last operator under such a mode.
    """
    candidates = true_at((role == Role.CANDIDATE) & (owner >= 0))
    numbered = true_at(_RECOMPUTED[role] & (owner >= 0) & (number >= 0) & (calls.kind == Kind.OP))
    if len(told):
        moded = candidates[among(number[owner[candidates]], number[told])]
        numbered = np.append(numbered, moded[_under_a_mode(calls, moded)])
    recompute_end = np.full(len(calls), -1, np.int64)
    np.maximum.at(recompute_end, owner[numbered], calls.end[numbered])
    late = candidates[calls.start[candidates] >= recompute_end[owner[candidates]]]
    role[late] = Role.FORMULA


def settle_gradients(
    calls: Calls, role: Int8, owner: Int32, functions: dict[int, int], held: HeldRuns
) -> None:
    """Turn what a function's own gradient runs again of other functions into FORMULA, in place.

    A checkpoint whose saved tensor a node asks for holds the call that saved it. So where the node
    of a function that somebody wrote runs forward work, and not its own call, no checkpoint
    asked for that. Where it runs its own call too, a checkpoint's recompute ends with that, but for
    work that its call does not hold.
    """
    candidates = _unheld(calls, role, owner, held)
    for node, function in functions.items():
        mine = candidates[calls.name[owner[candidates]] == node]
        if not len(mine):
            continue
        called = true_at((calls.name == function) & (calls.kind == Kind.OP))
        if not len(called):
            continue  # a range of the user's has its name
        around = owner[mine]
        first, last = called.searchsorted([around + 1, around + 1 + calls.size[around]])
        own = called[np.maximum(last - 1, 0)]
        behind = mine > own + calls.size[own]
        called_in = distinct(calls.name[own[0] + 1 : own[0] + 1 + calls.size[own[0]]])
        written = np.isin(calls.name[mine], [*functions.values()])
        behind &= written & among(calls.name[mine], called_in)
        role[mine[(first == last) | behind]] = Role.FORMULA


def settle_own_work(
    calls: Calls,
    role: Int8,
    engine: Int32,
    function: Int32,
    number: Ints,
    functions: CheckpointFunctions,
) -> None:
    """Turn what a checkpoint function works out itself into FORMULA, in place.

    It has no gradients of its own, and is no part of a block once the function's own backward pass
    has begun; between the parts of one that goes through its block in parts it rebuilds inputs.
    """
    checkpoint, in_parts = (
        np.array([words.function_of(name) in known for name in calls.names])
        for known in (functions.names, functions.in_parts)
    )
    rows = true_at((role == Role.CANDIDATE) & (number < 0) & (function < 0))
    rows = rows[checkpoint[calls.name[engine[rows]]]]
    nested = true_at((role == Role.BACKWARD) & (calls.parent >= 0))
    begun = np.full(len(calls), np.iinfo(np.int64).max)
    np.minimum.at(begun, engine[calls.parent[nested]], calls.start[nested])
    own = in_parts[calls.name[engine[rows]]] | (calls.start[rows] >= begun[engine[rows]])
    role[rows[own]] = Role.FORMULA
