"""Which autograd functions are checkpoints: by what their nodes do, whatever they are called.

A checkpoint's node runs forward operators again, with gradients on, and then starts a backward
pass of its own through them. Autograd calls a function's node after the function
(``torch/autograd/function.py``: its name and ``Backward``), and the profiler records the call in
the forward pass under the function's name, so that one leads to the other in any trace.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from recompute_scan.arrays import distinct, true_at
from recompute_scan.model import Calls
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.held import HeldRuns, operators_around
from recompute_scan.trace.columns import Bool, Int64, Kind

_NODE = "Backward"
# Nodes looked at for each name: one function does the same in every call.
_ENOUGH = 32
# A node that shares less with its call in the forward pass runs something else again, such as
# what a checkpoint around both recomputes.
_OWN_SHARE = 0.5
_PRODUCTS = frozenset({"aten::matmul", "aten::mm", "aten::bmm"})


class CheckpointFunctions(Struct, frozen=True):
    """The autograd functions in one trace, and which of them are checkpoints.

    Attributes:
        names: All of them, those known by name among them.
        in_parts: Those whose node goes back and forth: it runs a part again, and that part's
            backward pass, then the next. A model's own design, such as a reversible chain, and no
            switch that somebody left on.
        losses: Functions that do so and end the forward pass, such as a head with its loss in
            chunks. What they run again is their own formula: they are no checkpoints, and not
            among ``names``.
        called: By the code of its node's name, that of each function, but for the checkpoints that
            are known by name.
    """

    names: frozenset[str]
    in_parts: frozenset[str]
    losses: frozenset[str]
    called: dict[int, int]


def find_checkpoint_functions(calls: Calls, engine: Bool, held: HeldRuns) -> CheckpointFunctions:
    """The checkpoint functions of a trace.

    Args:
        calls: The trace's calls.
        engine: For each name: is it the engine's range around a node, or a bare node?
        held: Runs that a node goes through and that something else made.
    """
    known = frozenset(words.CHECKPOINT_FUNCTIONS)
    functions = _called_functions(calls)
    if not functions:
        return CheckpointFunctions(known, frozenset(), frozenset(), functions)
    operator = calls.kind == Kind.OP
    begun = true_at(engine[calls.name] & operator)
    starter = operators_around(calls, begun)
    # A bare node is its own engine range, so the outermost range is in no operator.
    inside = starter >= 0
    begun, starter = begun[inside], starter[inside]
    named = np.isin(calls.name[starter], list(functions))
    nodes, first = np.unique(starter[named], return_index=True)
    until = begun[named][first]
    found, in_parts, losses = set(known), set[str](), set[str]()
    for code in distinct(calls.name[nodes]).tolist():
        mine = true_at(calls.name[nodes] == code)[:_ENOUGH]
        pairs = list(zip(nodes[mine].tolist(), until[mine].tolist(), strict=True))
        name = calls.names[functions[code]]
        if not _run_again(calls, functions[code], pairs):
            continue
        goes_on = 2 * sum(_goes_on(calls, *pair) for pair in pairs) > len(pairs)
        if goes_on and all(_is_loss(calls, functions[code], node) for node, _ in pairs):
            losses.add(name)
            continue
        found.add(name)
        if goes_on:
            in_parts.add(name)
    found |= _going_through(calls, functions, held)
    return CheckpointFunctions(frozenset(found), frozenset(in_parts), frozenset(losses), functions)


def _going_through(calls: Calls, functions: dict[int, int], held: HeldRuns) -> set[str]:
    """Names of the functions whose nodes go through a run that something else made."""
    found = set()
    named = np.isin(calls.name[held.nodes], list(functions))
    for code in distinct(calls.name[held.nodes[named]]).tolist():
        function = functions[code]
        mine = true_at(calls.name[held.nodes] == code)
        nodes, first = np.unique(held.nodes[mine], return_index=True)
        judged = []
        for node, begin in list(zip(nodes.tolist(), mine[first].tolist(), strict=True))[:_ENOUGH]:
            rows = held.rows[mine[held.nodes[mine] == node]]
            stop = int((rows + 1 + calls.size[rows]).max())
            judged.append(_repeats(calls, function, node, int(held.rows[begin]), stop))
        if 2 * sum(judged) > len(judged):
            found.add(calls.names[function])
    return found


def _called_functions(calls: Calls) -> dict[int, int]:
    """By the code of its node's name, that of each autograd function that is no known checkpoint.

    Compiled code is no function that somebody wrote.
    """
    codes = {name: code for code, name in enumerate(calls.names)}
    return {
        codes[f"{name}{_NODE}"]: code
        for name, code in codes.items()
        if name not in words.CHECKPOINT_FUNCTIONS
        and f"{name}{_NODE}" in codes
        and not words.COMPILED_CALL.match(name)
    }


def _run_again(calls: Calls, function: int, pairs: list[tuple[int, int]]) -> bool:
    """Do most of a function's nodes run their calls' operators again, before ``stop``?

    Where a node holds a call of its own function, a checkpoint around the function ran that again,
    or the function is nested in itself. The latter shows in other nodes, the former ends with it.
    """
    calls_of = true_at((calls.name == function) & (calls.kind == Kind.OP))
    begins = []
    for node, stop in pairs:
        first, last = calls_of.searchsorted([node, stop])
        own = calls_of[first:last]
        begins.append(int((own + 1 + calls.size[own]).max(initial=node + 1)))
    bare = [begin == node + 1 for begin, (node, _) in zip(begins, pairs, strict=True)]
    judged = [
        _runs_again(calls, function, node, begin, stop)
        for alone, begin, (node, stop) in zip(bare, begins, pairs, strict=True)
        if alone or not any(bare)
    ]
    return 2 * sum(judged) > len(judged)


def _runs_again(calls: Calls, function: int, node: int, begin: int, stop: int) -> bool:
    """Does a node run its call's operators within [begin, stop)? There its backward pass begins."""
    own = _own_operators(calls, node, begin, stop)
    return bool(len(own)) and _repeats(calls, function, node, begin, stop)


def _repeats(calls: Calls, function: int, node: int, begin: int, stop: int) -> bool:
    """Is what ran within [begin, stop) what a node's call ran, with gradients at its end?"""
    own = _call_of(calls, function, node)
    if own is None:
        return False
    first = _kinds(calls, own + 1, own + 1 + int(calls.size[own]))
    again = _kinds(calls, begin, stop)
    if len(again & first) < _OWN_SHARE * len(again):
        return False
    # The nested backward pass begins where the call's result was made.
    last = _last_work(calls, own)
    return last is None or last in _with_gradients(calls, begin, stop)


def _goes_on(calls: Calls, node: int, stop: int) -> bool:
    """Does a node run numbered operators after its own backward pass has begun, too?"""
    return bool(len(_own_operators(calls, node, stop, node + 1 + int(calls.size[node]))))


def _is_loss(calls: Calls, function: int, node: int) -> bool:
    """Did the forward pass end with the call: nothing heavy after it, and nothing to reduce?

    A backward pass begins at one number, so either the call made it, or something after it did.
    """
    own = _call_of(calls, function, node)
    own = None if own is None else _in_forward(calls, function, own)
    if own is None:
        return False
    after = calls.start >= calls.end[own]
    after &= (calls.start < calls.start[node]) & (calls.thread == calls.thread[own])
    rows = true_at(after & (calls.kind == Kind.OP) & (calls.sequence >= 0))
    names = {calls.names[name] for name in distinct(calls.name[rows]).tolist()}
    return not any(words.forward_only(name) or words.REDUCES.match(name) for name in names)


def _own_operators(calls: Calls, node: int, first: int, stop: int) -> Int64:
    """Rows within [first, stop) of the operators directly in a node, with gradients on."""
    rows = np.arange(first, stop)
    rows = rows[(calls.kind[rows] == Kind.OP) & (calls.sequence[rows] >= 0)]
    rows = rows[operators_around(calls, rows) == node]
    names = calls.name[rows].tolist()
    started = np.array([calls.names[name].startswith(words.ENGINE) for name in names], np.bool_)
    found: Int64 = rows[~started]
    return found


def _call_of(calls: Calls, function: int, node: int) -> int | None:
    """Row of the call in the forward pass whose node this is, by autograd's number."""
    same = (calls.name == function) & (calls.kind == Kind.OP) & (calls.start < calls.start[node])
    rows = true_at(same & (calls.sequence == calls.sequence[node]))
    return int(rows[-1]) if len(rows) else None


def _in_forward(calls: Calls, function: int, own: int) -> int | None:
    """The call itself; for one that a checkpoint around it ran again, the last before that which
    none did.
    """
    began = _outermost_engine(calls, own)
    if began is None:
        return own
    same = (calls.name == function) & (calls.kind == Kind.OP) & (calls.start < calls.start[began])
    for row in true_at(same)[::-1].tolist():
        if _outermost_engine(calls, row) is None:
            return int(row)
    return None


def _outermost_engine(calls: Calls, row: int) -> int | None:
    found = None
    row = int(calls.parent[row])
    while row >= 0:
        if calls.names[calls.name[row]].startswith(words.ENGINE):
            found = row
        row = int(calls.parent[row])
    return found


def _last_work(calls: Calls, own: int) -> int | None:
    """Name of the last operator in a call that is heavy work of a forward pass, if any is."""
    inside = np.arange(own + 1, own + 1 + calls.size[own])
    for row in inside[calls.kind[inside] == Kind.OP][::-1].tolist():
        name = calls.names[calls.name[row]]
        if words.forward_only(name) or name in _PRODUCTS:
            return int(calls.name[row])
    return None


def _with_gradients(calls: Calls, first: int, stop: int) -> set[int]:
    """Names of the operators within [first, stop) with numbers, and of those inside these."""
    rows = np.arange(first, stop)
    begin = rows[(calls.kind[rows] == Kind.OP) & (calls.sequence[rows] >= 0)]
    edge = np.zeros(stop - first + 1, np.int64)
    np.add.at(edge, begin - first, 1)
    np.add.at(edge, np.minimum(begin + 1 + calls.size[begin], stop) - first, -1)
    return set(calls.name[rows[edge.cumsum()[:-1] > 0]].tolist())


def _kinds(calls: Calls, first: int, stop: int) -> set[tuple[int, int]]:
    """Name and shapes of each operator within [first, stop), those inside others too."""
    rows = first + true_at(calls.kind[first:stop] == Kind.OP)
    return set(zip(calls.name[rows].tolist(), calls.dims[rows].tolist(), strict=True))
