"""Which autograd functions are checkpoints: by what their nodes do, whatever they are called.

A checkpoint's node runs forward operators again, with gradients on, and then starts a backward
pass of its own through them. Autograd calls a function's node after the function
(``torch/autograd/function.py``: its name and ``Backward``), and the profiler records the call in
the forward pass under the function's name, so that one leads to the other in any trace.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from recompute_scan.model import Calls
from recompute_scan.recompute import vocabulary as words
from recompute_scan.trace.columns import Bool, Int64, Ints, Kind

_NODE = "Backward"
# Nodes looked at for each name: one function does the same in every call.
_ENOUGH = 32
# A node that shares less with its call in the forward pass runs something else again, such as
# what a checkpoint around both recomputes.
_OWN_SHARE = 0.5


def find_checkpoint_functions(calls: Calls, engine: Bool) -> frozenset[str]:
    """Names of the functions in this trace that are checkpoints, those known by name among them.

    Args:
        calls: The trace's calls.
        engine: For each name: is it the engine's range around a node, or a bare node?
    """
    codes = {name: code for code, name in enumerate(calls.names)}
    known = words.CHECKPOINT_FUNCTIONS.keys() & codes
    functions = {
        codes[f"{name}{_NODE}"]: code
        for name, code in codes.items()
        if name not in known and f"{name}{_NODE}" in codes and not words.COMPILED_CALL.match(name)
    }
    if not functions:
        return frozenset(known)
    operator = calls.kind == Kind.OP
    begun = np.flatnonzero(engine[calls.name] & operator)
    starter = _operators_around(calls, begun)
    # A bare node is its own engine range, so the outermost range stands in no operator.
    inside = starter >= 0
    begun, starter = begun[inside], starter[inside]
    named = np.isin(calls.name[starter], list(functions))
    nodes, first = np.unique(starter[named], return_index=True)
    until = begun[named][first]
    found = set(known)
    for code in np.unique(calls.name[nodes]).tolist():
        mine = np.flatnonzero(calls.name[nodes] == code)[:_ENOUGH]
        again = sum(
            _runs_again(calls, functions[code], node, stop)
            for node, stop in zip(nodes[mine].tolist(), until[mine].tolist(), strict=True)
        )
        if 2 * again > len(mine):
            found.add(calls.names[functions[code]])
    return frozenset(found)


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
    rows = np.arange(node + 1, stop)
    rows = rows[(calls.kind[rows] == Kind.OP) & (calls.sequence[rows] >= 0)]
    rows = rows[_operators_around(calls, rows) == node]
    if not len(rows):
        return False
    own = _call_of(calls, function, node)
    if own is None:
        return False
    inside = np.arange(own + 1, own + 1 + int(calls.size[own]))
    first = set(_kinds(calls, inside))
    again = set(_kinds(calls, rows))
    return len(again & first) >= _OWN_SHARE * len(again)


def _call_of(calls: Calls, function: int, node: int) -> int | None:
    """Row of the call in the forward pass whose node this is, by autograd's number."""
    same = (calls.name == function) & (calls.kind == Kind.OP) & (calls.start < calls.start[node])
    rows = np.flatnonzero(same & (calls.sequence == calls.sequence[node]))
    return int(rows[-1]) if len(rows) else None


def _kinds(calls: Calls, rows: Ints) -> Iterable[tuple[int, int]]:
    return zip(calls.name[rows].tolist(), calls.dims[rows].tolist(), strict=True)
