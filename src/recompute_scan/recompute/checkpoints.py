"""Which autograd functions are checkpoints: by what their nodes do, whatever they are called.

A checkpoint's node starts a backward pass through what ran for its own call: in the node itself,
or in an evaluation before it, where a hook or a second function ran the block. Autograd calls a
function's node after the function (``torch/autograd/function.py``: its name and ``Backward``), and
the profiler records the call under the function's name.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.evaluations import Evaluations
from recompute_scan.trace.calls import Calls
from recompute_scan.trace.columns import Bool, Int32, Int64, Kind

_NODE = "Backward"
# Calls looked at for each name: one function does the same in every call.
_ENOUGH = 8
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


def find_checkpoint_functions(calls: Calls, evaluations: Evaluations) -> CheckpointFunctions:
    """The checkpoint functions of a trace."""
    known = frozenset(vocabulary.CHECKPOINT_FUNCTIONS)
    functions = _called_functions(calls)
    going = _own_nodes(calls, evaluations, functions)
    rows = np.flatnonzero(evaluations.through >= 0)
    goes = evaluations.through[rows]
    rows, goes = rows[going[goes] >= 0], goes[going[goes] >= 0]
    found = np.array(
        [
            function
            for function in np.unique(going[goes]).tolist()
            if _go_through_all(calls, evaluations, rows, goes, going == function)
        ],
        np.int64,
    )
    again = (evaluations.of[rows] == goes) & (calls.start[rows] >= evaluations.nested_at[goes])
    in_parts = np.unique(going[goes[again & np.isin(going[goes], found)]])
    losses = [
        function
        for function in in_parts.tolist()
        if _are_losses(calls, evaluations, np.flatnonzero(going == function))
    ]
    names = {calls.names[code] for code in found.tolist() if code not in losses}
    return CheckpointFunctions(
        names=known | names,
        in_parts=frozenset(calls.names[code] for code in in_parts.tolist() if code not in losses),
        losses=frozenset(calls.names[code] for code in losses),
        called=functions,
    )


def _go_through_all(
    calls: Calls, evaluations: Evaluations, rows: Int64, goes: Int32, mine: Bool
) -> bool:
    """Do most of a function's nodes go through the last heavy work of their calls?

    A backward pass begins where the call's result was made; a function may run less than that for
    a formula of its own.
    """
    order = goes.argsort(kind="stable")
    judged = []
    for one in np.unique(goes[mine[goes]])[:_ENOUGH].tolist():
        first, stop = goes[order].searchsorted([one, one + 1])
        last = _last_work(calls, int(evaluations.maker[one]))
        judged.append(last is None or _hold(calls, rows[order[first:stop]], last))
    return 2 * sum(judged) > len(judged)


def _hold(calls: Calls, rows: Int64, name: int) -> bool:
    """Is one of these calls, in order, or one inside them, of this name?"""
    end = -1
    for row in rows.tolist():
        if row < end:
            continue
        end = row + 1 + int(calls.size[row])
        if (calls.name[row:end] == name).any():
            return True
    return False


def _last_work(calls: Calls, own: int) -> int | None:
    """Name of the last operator in a call that is heavy work of a forward pass, if any is."""
    inside = np.arange(own + 1, own + 1 + calls.size[own])
    for row in inside[calls.kind[inside] == Kind.OP][::-1].tolist():
        name = calls.names[calls.name[row]]
        if vocabulary.forward_only(name) or name in _PRODUCTS:
            return int(calls.name[row])
    return None


def _called_functions(calls: Calls) -> dict[int, int]:
    """By the code of its node's name, that of each autograd function that is no known checkpoint.

    Compiled code is no function that somebody wrote.
    """
    codes = {name: code for code, name in enumerate(calls.names)}
    return {
        codes[f"{name}{_NODE}"]: code
        for name, code in codes.items()
        if name not in vocabulary.CHECKPOINT_FUNCTIONS
        and f"{name}{_NODE}" in codes
        and not vocabulary.COMPILED_CALL.match(name)
    }


def _own_nodes(calls: Calls, evaluations: Evaluations, functions: dict[int, int]) -> Int64:
    """Of each evaluation the code of the function whose call made its node; -1 for none."""
    of_name = np.full(len(calls.names), -1, np.int64)
    codes = {name: code for code, name in enumerate(calls.names)}
    for node, function in functions.items():
        of_name[node] = function
        if (engine := codes.get(f"{vocabulary.ENGINE}{calls.names[node]}")) is not None:
            of_name[engine] = function
    found = of_name[calls.name[evaluations.row]]
    maker = evaluations.maker
    own = (maker >= 0) & (calls.name[np.maximum(maker, 0)] == found)
    return np.where(own, found, -1)


def _are_losses(calls: Calls, evaluations: Evaluations, nodes: Int64) -> bool:
    """Did the forward pass end with each of these nodes' calls: nothing heavy after, or to reduce?

    A backward pass begins at one number, so either the call made it, or something after it did.
    """
    roots = nodes[evaluations.of[evaluations.maker[nodes]] < 0][:_ENOUGH]
    return bool(len(roots)) and all(
        _is_loss(calls, int(evaluations.maker[one]), int(evaluations.row[one]))
        for one in roots.tolist()
    )


def _is_loss(calls: Calls, own: int, node: int) -> bool:
    after: Bool = calls.start >= calls.end[own]
    after &= (calls.start < calls.start[node]) & (calls.thread == calls.thread[own])
    rows = np.flatnonzero(after & (calls.kind == Kind.OP) & (calls.sequence >= 0))
    names = {calls.names[name] for name in np.unique(calls.name[rows]).tolist()}
    return not any(
        vocabulary.forward_only(name) or vocabulary.REDUCES.match(name) for name in names
    )
