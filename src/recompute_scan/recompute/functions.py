"""Which autograd functions are checkpoints: by what their nodes do, whatever they are called.

A checkpoint's node runs forward operators again, with gradients on, and then starts a backward
pass of its own through them. Autograd calls a function's node after the function
(``torch/autograd/function.py``: its name and ``Backward``), and the profiler records the call in
the forward pass under the function's name, so that one leads to the other in any trace.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from recompute_scan.arrays import distinct
from recompute_scan.model import Calls
from recompute_scan.recompute import vocabulary as words
from recompute_scan.trace.columns import Bool, Int64, Kind

_NODE = "Backward"
# Nodes looked at for each name: one function does the same in every call.
_ENOUGH = 32
# A node that shares less with its call in the forward pass runs something else again, such as
# what a checkpoint around both recomputes.
_OWN_SHARE = 0.5


class CheckpointFunctions(Struct, frozen=True):
    """Names of the functions in one trace that are checkpoints.

    Attributes:
        names: All of them, those known by name among them.
        in_parts: Those whose node goes back and forth: it runs a part again, and that part's
            backward pass, then the next. A model's own design, such as a reversible chain, and no
            switch that somebody left on.
        losses: Functions that do so and end the forward pass, such as a head with its loss in
            chunks. What they run again is their own formula: they are no checkpoints, and not
            among ``names``.
    """

    names: frozenset[str]
    in_parts: frozenset[str]
    losses: frozenset[str]


def find_checkpoint_functions(calls: Calls, engine: Bool) -> CheckpointFunctions:
    """The checkpoint functions of a trace.

    Args:
        calls: The trace's calls.
        engine: For each name: is it the engine's range around a node, or a bare node?
    """
    codes = {name: code for code, name in enumerate(calls.names)}
    known = frozenset(words.CHECKPOINT_FUNCTIONS)
    functions = {
        codes[f"{name}{_NODE}"]: code
        for name, code in codes.items()
        if name not in known and f"{name}{_NODE}" in codes and not words.COMPILED_CALL.match(name)
    }
    if not functions:
        return CheckpointFunctions(known, frozenset(), frozenset())
    operator = calls.kind == Kind.OP
    begun = np.flatnonzero(engine[calls.name] & operator)
    starter = _operators_around(calls, begun)
    # A bare node is its own engine range, so the outermost range is in no operator.
    inside = starter >= 0
    begun, starter = begun[inside], starter[inside]
    named = np.isin(calls.name[starter], list(functions))
    nodes, first = np.unique(starter[named], return_index=True)
    until = begun[named][first]
    found, in_parts, losses = set(known), set[str](), set[str]()
    for code in distinct(calls.name[nodes]).tolist():
        mine = np.flatnonzero(calls.name[nodes] == code)[:_ENOUGH]
        pairs = list(zip(nodes[mine].tolist(), until[mine].tolist(), strict=True))
        name = calls.names[functions[code]]
        if 2 * sum(_runs_again(calls, functions[code], *pair) for pair in pairs) <= len(pairs):
            continue
        goes_on = 2 * sum(_goes_on(calls, *pair) for pair in pairs) > len(pairs)
        if goes_on and all(_is_loss(calls, functions[code], node) for node, _ in pairs):
            losses.add(name)
            continue
        found.add(name)
        if goes_on:
            in_parts.add(name)
    return CheckpointFunctions(frozenset(found), frozenset(in_parts), frozenset(losses))


def _operators_around(calls: Calls, rows: Int64) -> Int64:
    """Row of the innermost operator that holds each of these, looking through annotations; or -1.

    Each row's own is the first operator above it.
    """
    around: Int64 = calls.parent[rows].astype(np.int64)
    while True:
        through = np.flatnonzero((around >= 0) & (calls.kind[around] == Kind.ANNOTATION))
        if not len(through):
            return around
        around[through] = calls.parent[around[through]]


def _runs_again(calls: Calls, function: int, node: int, stop: int) -> bool:
    """Does a node, before its own backward pass begins at ``stop``, run its call's operators?"""
    if not len(_own_operators(calls, node, node + 1, stop)):
        return False
    own = _call_of(calls, function, node)
    if own is None:
        return False
    first = _kinds(calls, own + 1, own + 1 + int(calls.size[own]))
    again = _kinds(calls, node + 1, stop)
    return len(again & first) >= _OWN_SHARE * len(again)


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
    rows = np.flatnonzero(after & (calls.kind == Kind.OP) & (calls.sequence >= 0))
    names = {calls.names[name] for name in distinct(calls.name[rows]).tolist()}
    return not any(words.forward_only(name) or words.REDUCES.match(name) for name in names)


def _own_operators(calls: Calls, node: int, first: int, stop: int) -> Int64:
    """Rows within [first, stop) of the operators directly in a node, with gradients on."""
    rows = np.arange(first, stop)
    rows = rows[(calls.kind[rows] == Kind.OP) & (calls.sequence[rows] >= 0)]
    rows = rows[_operators_around(calls, rows) == node]
    names = calls.name[rows].tolist()
    started = np.array([calls.names[name].startswith(words.ENGINE) for name in names], np.bool_)
    found: Int64 = rows[~started]
    return found


def _call_of(calls: Calls, function: int, node: int) -> int | None:
    """Row of the call in the forward pass whose node this is, by autograd's number."""
    same = (calls.name == function) & (calls.kind == Kind.OP) & (calls.start < calls.start[node])
    rows = np.flatnonzero(same & (calls.sequence == calls.sequence[node]))
    return int(rows[-1]) if len(rows) else None


def _in_forward(calls: Calls, function: int, own: int) -> int | None:
    """The call itself; for one that a checkpoint around it ran again, the last before that which
    none did.
    """
    began = _outermost_engine(calls, own)
    if began is None:
        return own
    same = (calls.name == function) & (calls.kind == Kind.OP) & (calls.start < calls.start[began])
    for row in np.flatnonzero(same)[::-1].tolist():
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


def _kinds(calls: Calls, first: int, stop: int) -> set[tuple[int, int]]:
    """Name and shapes of each operator within [first, stop), those inside others too."""
    rows = first + np.flatnonzero(calls.kind[first:stop] == Kind.OP)
    return set(zip(calls.name[rows].tolist(), calls.dims[rows].tolist(), strict=True))
