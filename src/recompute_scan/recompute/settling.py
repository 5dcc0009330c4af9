"""What becomes of calls whose place alone does not say whether they are a recompute.

By place, an operator in the backward pass could be one. Whose it is tells what ran around it: its
node's formula, a gradient hook, another function's gradient, an optimizer's update behind its
closure. Each function here changes ``role``, one entry per call, in place.
"""

from __future__ import annotations

import numpy as np

from recompute_scan.arrays import among, distinct
from recompute_scan.model import Calls
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.functions import CheckpointFunctions
from recompute_scan.recompute.numbers import under_a_mode
from recompute_scan.recompute.roles import Role, table
from recompute_scan.trace.columns import Bool, Int8, Int32, Int64, Ints, Kind

_RECOMPUTED = table(Role.CANDIDATE, Role.RANGE)


def settle_updates(calls: Calls, role: Int8, closures: Int64) -> None:
    """Turn what follows the closure in an optimizer's range into OPTIMIZER, in place."""
    engines = np.flatnonzero(role == Role.BACKWARD)
    for row in closures.tolist():
        inside = np.arange(row + 1, row + 1 + calls.size[row])
        # On a GPU the backward pass runs in another thread, and the closure waits for it.
        began = calls.start[engines]
        within = engines[(began >= calls.start[row]) & (began < calls.end[row])]
        last = inside[(calls.sequence[inside] >= 0) & (calls.kind[inside] == Kind.OP)]
        update = max(calls.end[within].max(initial=0), calls.end[last].max(initial=0))
        after = inside[(role[inside] == Role.FORWARD) & (calls.start[inside] >= update)]
        role[after] = Role.OPTIMIZER


def settle_hooks(calls: Calls, role: Int8, engine: Int32, owner: Int32, node: Bool) -> None:
    """Turn candidates that a gradient hook ran into FORMULA, in place."""
    holds_node = np.zeros(len(calls), np.bool_)
    holds_node[engine[node]] = True
    accumulates = np.array([name == words.ACCUMULATE_GRAD for name in calls.names], np.bool_)
    candidates = np.flatnonzero((role == Role.CANDIDATE) & (owner >= 0))
    around = engine[candidates]
    hooked = (owner[candidates] == around) & holds_node[around]
    role[candidates[hooked | accumulates[calls.name[around]]]] = Role.FORMULA


def settle_formulas(calls: Calls, role: Int8, owner: Int32, number: Ints, told: Int64) -> None:
    """Turn candidates that belong to a node's own formula into FORMULA, in place.

    A recompute comes before the formula that asked for it, so whatever starts after the last
    operator with a sequence number of its own is formula. Where a dispatch mode left the operators
    of the forward pass without one, it is the last operator under such a mode.
    """
    candidates = np.flatnonzero((role == Role.CANDIDATE) & (owner >= 0))
    numbered = np.flatnonzero(
        _RECOMPUTED[role] & (owner >= 0) & (number >= 0) & (calls.kind == Kind.OP)
    )
    if len(told):
        moded = candidates[among(number[owner[candidates]], number[told])]
        numbered = np.append(numbered, moded[under_a_mode(calls, moded)])
    recompute_end = np.full(len(calls), -1, np.int64)
    np.maximum.at(recompute_end, owner[numbered], calls.end[numbered])
    late = candidates[calls.start[candidates] >= recompute_end[owner[candidates]]]
    role[late] = Role.FORMULA


def settle_gradients(calls: Calls, role: Int8, owner: Int32, functions: dict[int, int]) -> None:
    """Turn what a function's own gradient runs again of other functions into FORMULA, in place.

    A checkpoint whose saved tensor a node asks for holds the call that saved it. So where the node
    of a function that somebody wrote runs forward work, and not its own call, no checkpoint
    asked for that. Where it runs its own call too, a checkpoint's recompute ends with that, but for
    work that its call does not hold.
    """
    candidates = np.flatnonzero((role == Role.CANDIDATE) & (owner >= 0))
    for node, function in functions.items():
        mine = candidates[calls.name[owner[candidates]] == node]
        if not len(mine):
            continue
        called = np.flatnonzero((calls.name == function) & (calls.kind == Kind.OP))
        if not len(called):
            continue  # a range of the user's has its name
        around = owner[mine]
        first, last = np.searchsorted(called, [around + 1, around + 1 + calls.size[around]])
        own = called[np.maximum(last - 1, 0)]
        behind = mine > own + calls.size[own]
        held = distinct(calls.name[own[0] + 1 : own[0] + 1 + calls.size[own[0]]])
        written = np.isin(calls.name[mine], [*functions.values()])
        behind &= written & among(calls.name[mine], held)
        role[mine[(first == last) | behind]] = Role.FORMULA


def settle_parts(
    calls: Calls,
    role: Int8,
    engine: Int32,
    function: Int32,
    number: Ints,
    functions: CheckpointFunctions,
) -> None:
    """Turn what a function that goes through its block in parts works out itself into FORMULA.

    Between the parts it rebuilds inputs and adds up gradients, without gradients of its own. In
    place.
    """
    nodes = words.nodes_of(functions.in_parts)
    in_parts = np.array([name.removeprefix(words.ENGINE) in nodes for name in calls.names])
    own = (role == Role.CANDIDATE) & (number < 0) & (function < 0)
    rows = np.flatnonzero(own & in_parts[calls.name[engine]])
    role[rows] = Role.FORMULA
