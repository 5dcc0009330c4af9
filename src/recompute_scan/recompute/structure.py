"""Which calls are forward work, which could be a recompute, which are backward work.

Nothing here decides that a call *is* a recompute: that takes the match with the forward pass in
:mod:`recompute_scan.recompute.align`. Structure says where recomputes can stand:

* A reentrant recompute is inside its checkpoint function's node, whatever that is called
  (``evaluate_function: CheckpointFunctionBackward`` > ``CheckpointFunctionBackward``), before
  the nested backward pass that it starts.
* A non-reentrant recompute is inside whichever node first asked for a saved tensor, before
  that node's own formula. The recompute runs with gradients on, so its operators carry sequence
  numbers; a formula's operators do not, unless gradients of gradients are wanted.
* Gradient hooks run inside the engine's range but outside the node, or in the node that adds
  a gradient to its parameter. Neither asks for a saved tensor, so what they run is no recompute,
  unless another node goes backward through it (:mod:`recompute_scan.recompute.held`).

Source: ``torch/utils/checkpoint.py`` (``CheckpointFunction.backward``, ``unpack_hook``) and
``torch/csrc/autograd/engine.cpp``.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from msgspec import Struct

from recompute_scan.arrays import distinct, true_at
from recompute_scan.model import Calls
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.functions import CheckpointFunctions, find_checkpoint_functions
from recompute_scan.recompute.held import HeldRuns, find_held_runs
from recompute_scan.recompute.roles import LOOKED_THROUGH, OPERATORS, Role, table
from recompute_scan.recompute.settling import (
    numbers_of,
    settle_formulas,
    settle_gradients,
    settle_hooks,
    settle_own_work,
    settle_updates,
)
from recompute_scan.trace.columns import Bool, Int8, Int32, Int64, Ints, Kind

_OPEN = table(Role.RANGE, Role.BACKWARD, Role.FORMULA)
_KEEPS_OWNER = table(Role.RANGE, Role.CANDIDATE, Role.INNER)


class Structure(Struct, frozen=True):
    """One entry per call.

    Attributes:
        role: A :class:`Role`.
        engine: Row of the innermost engine range that holds the call (itself for one), or -1.
        top: Row of the outermost operator with a role of its own that holds the call, or -1.
        function: Row of the innermost checkpoint function *inside the same engine range* that
            holds the call, or -1.
        checkpoint_node: For engine ranges: is its node a checkpoint function's?
        functions: The checkpoint functions in the trace, by name.
        number: Autograd's sequence number of the call; for a forward operator or candidate
            without one (TorchScript), the lowest inside it; for an engine range, its node's;
            -1 for none.
        roots: Rows of the engine ranges that are in no other, in order.
        told: Rows of the operators whose number is that of the node that they made: they have
            none of their own.
        held: Runs that a node goes through and that something else made.
    """

    role: Int8
    engine: Int32
    top: Int32
    function: Int32
    checkpoint_node: Bool
    functions: CheckpointFunctions
    number: Ints
    roots: Int64
    told: Int64
    held: HeldRuns

    def rows(self, role: int) -> Int64:
        """Rows with that role, in order."""
        return true_at(self.role == role)


class _NameClasses(Struct, frozen=True):
    engine: Bool
    node: Int64  # for engine ranges: the code of the node's name, else -1
    function: Bool
    checkpoint_node: Bool
    functions: CheckpointFunctions
    held: HeldRuns
    optimizer: Bool
    plumbing: Bool


def classify(calls: Calls) -> Structure:
    """The role of every call; see :class:`Structure`."""
    classes = _classify_names(calls)
    size = len(calls)
    # A call in no other has row -1 for its parent: what is behind the last.
    role = np.full(size + 1, Role.INNER, np.int8)
    role[-1] = Role.RANGE
    engine = np.full(size + 1, -1, np.int32)
    function = np.full(size + 1, -1, np.int32)
    # The engine range or node whose own formula this call could belong to; -1 in a recompute or
    # in the forward pass.
    owner = np.full(size + 1, -1, np.int32)
    node = np.zeros(size, np.bool_)
    is_checkpoint_node = classes.checkpoint_node[calls.name] & (calls.kind == Kind.OP)
    holds_backward = _holding_backward(calls, classes) | _broken_regions(calls)
    closures = _closures(calls, classes)
    closure = np.zeros(size, np.bool_)
    closure[closures] = True
    node_of_engine = classes.node[calls.name]
    begins_engine = classes.engine[calls.name] & (calls.kind == Kind.OP)
    for every in calls.levels():
        parent = calls.parent[every].astype(np.intp)
        # What lies inside an operator with a role is nothing of its own: most calls do.
        for above in (engine, owner, function):
            above[every] = above.take(parent)
        above_role = role.take(parent)
        some = true_at(_OPEN[above_role] | begins_engine[every])
        if not len(some):
            continue
        rows, parent, above_role = every[some], parent[some], above_role[some]
        above_engine, above_owner, above_function = engine[rows], owner[rows], function[rows]
        name, kind = calls.name[rows], calls.kind[rows]
        is_op = kind == Kind.OP

        starts_engine = begins_engine[rows]
        open_above = LOOKED_THROUGH[above_role] | (
            (above_role == Role.FORMULA) & (above_owner == parent)
        )
        # What is in no other call is in no range of the engine's.
        is_node = (above_role == Role.BACKWARD) & is_op & (name == node_of_engine[parent])
        new = np.full(len(rows), Role.INNER, np.int8)
        free = open_above & ~is_node
        in_backward = above_engine >= 0
        new[free & is_op] = Role.FORWARD
        new[free & is_op & in_backward] = Role.CANDIDATE
        in_function = is_op & classes.function[name]
        looked_through = (kind == Kind.ANNOTATION) | in_function
        looked_through |= holds_backward[rows]
        new[free & looked_through] = Role.RANGE
        new[free & classes.plumbing[name] & (kind != Kind.RUNTIME)] = Role.PLUMBING
        new[free & classes.optimizer[name] & ~closure[rows]] = Role.OPTIMIZER
        new[is_node] = Role.FORMULA
        new[starts_engine] = Role.BACKWARD

        role[rows] = new
        node[rows] = is_node
        engine[rows] = np.where(starts_engine, rows, above_engine)
        starts, of_checkpoint = starts_engine | is_node, is_checkpoint_node[rows]
        above_owner[~_KEEPS_OWNER[new]] = -1
        owner[rows] = np.where(starts & ~of_checkpoint, rows, above_owner)
        # A checkpoint function's node is looked through: all it runs itself is the recompute.
        role[rows[is_node & of_checkpoint]] = Role.RANGE
        in_function &= new == Role.RANGE
        above_function[starts] = -1
        function[rows] = np.where(in_function & ~starts, rows, above_function)
    role, engine, function, owner = role[:-1], engine[:-1], function[:-1], owner[:-1]
    settle_updates(calls, role, closures)
    settle_hooks(calls, role, engine, owner, node, classes.held)
    number, told = numbers_of(calls, OPERATORS[role], engine, true_at(node))
    settle_formulas(calls, role, owner, number, told)
    settle_gradients(calls, role, owner, classes.functions.called, classes.held)
    settle_own_work(calls, role, engine, function, number, classes.functions)
    return Structure(
        role=role,
        engine=engine,
        top=_tops(calls, role),
        function=function,
        checkpoint_node=_has_checkpoint_node(calls, classes),
        functions=classes.functions,
        number=number,
        roots=_outermost(calls, role, engine),
        told=told,
        held=classes.held,
    )


def _holding_backward(calls: Calls, classes: _NameClasses) -> Bool:
    """For each call: does it hold engine ranges, and is no autograd function? Then it is a range.

    ``torch.compile`` puts ranges around the functions that it was given and what they call, with
    the backward passes that these start.
    """
    engines = np.append(0, classes.engine[calls.name].cumsum())
    rows = true_at((calls.size > 0) & (calls.sequence < 0))
    held = np.zeros(len(calls), np.bool_)
    held[rows] = engines[rows + 1 + calls.size[rows]] > engines[rows + 1]
    return held


def _broken_regions(calls: Calls) -> Bool:
    """For each call: is it a compiled region that a graph break divides, or that runs in Python?

    It holds other regions, or operators with numbers of their own outside compiled functions. All
    versions of its code are looked through, so that a recompute looks like its forward.
    """
    names = [words.COMPILED_REGION.match(name) for name in calls.names]
    region = np.array([name is not None for name in names], np.bool_)
    broken = np.zeros(len(calls), np.bool_)
    rows = true_at(region[calls.name])
    if not len(rows):
        return broken
    compiled = calls.matching(words.COMPILED_FUNCTION)[calls.name]
    hidden = calls.within(true_at(compiled))
    own = (calls.sequence >= 0) & (calls.kind == Kind.OP) & ~hidden
    told = np.append(0, np.cumsum(own | region[calls.name]))
    divided = rows[told[rows + 1 + calls.size[rows]] > told[rows + 1]]
    frames = {match[1] for code in distinct(calls.name[divided]) if (match := names[code])}
    same = np.array([name is not None and name[1] in frames for name in names], np.bool_)
    return np.asarray(same[calls.name], np.bool_)


def _closures(calls: Calls, classes: _NameClasses) -> Int64:
    """Rows of optimizer ranges that hold forward work: ``optimizer.step(closure)``.

    Lightning steps so by default. An update itself runs without gradients, so that none of its
    operators has a sequence number.
    """
    ranges = true_at(classes.optimizer[calls.name])
    numbered = true_at((calls.sequence >= 0) & (calls.kind == Kind.OP))
    first = numbered.searchsorted(ranges + 1)
    return ranges[first < numbered.searchsorted(ranges + 1 + calls.size[ranges])]


class OperatorCodes:
    """One number per call, equal for calls of equal (or alike) name, shapes and types.

    ``codes[rows]`` are those of some rows; they are not kept.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._kind = words.alike(calls.names) * (int(calls.dims.max(initial=0)) + 1)

    def __getitem__(self, rows: Ints) -> Int64:
        codes: Int64 = self._kind[self._calls.name[rows]] + self._calls.dims[rows]
        return codes


def enclosing_engines(calls: Calls, structure: Structure, engines: Int64) -> Ints:
    """Row of the engine range around each of these engine ranges, -1 for the outermost."""
    parent = calls.parent[engines]
    return np.where(parent >= 0, structure.engine[np.maximum(parent, 0)], -1)


def making_engines(structure: Structure, engines: Ints) -> Ints:
    """For each engine range: the one that made the run that its node goes through, or itself."""
    made = np.arange(len(structure.engine) + 1)
    made[-1] = -1
    held = structure.held
    made[structure.engine[held.nodes]] = structure.engine[held.makers]
    return made[engines]


def _outermost(calls: Calls, role: Int8, engine: Int32) -> Int64:
    engines = true_at(role == Role.BACKWARD)
    parent = calls.parent[engines]
    return engines[(parent < 0) | (engine[np.maximum(parent, 0)] < 0)]


def _tops(calls: Calls, role: Int8) -> Int32:
    """Row of the outermost operator with a role around each call; a node stands for its formula."""
    top = np.full(len(calls) + 1, -1, np.int32)  # see `classify`
    for rows in calls.levels():
        above = top.take(calls.parent[rows])
        own = role[rows]
        within = (own == Role.INNER) | ((own == Role.FORMULA) & (above >= 0))
        top[rows] = np.where(LOOKED_THROUGH[own], -1, np.where(within, above, rows))
    return top[:-1]


def _classify_names(calls: Calls) -> _NameClasses:
    codes = {name: code for code, name in enumerate(calls.names)}
    node = np.full(len(calls.names), -1, np.int64)
    engine = np.array([name.startswith(words.ENGINE) for name in calls.names], np.bool_)
    if engine.any():
        for code in true_at(engine):
            node[code] = codes.get(calls.names[code][len(words.ENGINE) :], -1)
    else:
        # A bare node is its own engine range.
        engine = calls.matching(words.BARE_NODE)
        node[engine] = true_at(engine)

    def among(known: Collection[str]) -> Bool:
        return np.array([name in known for name in calls.names], np.bool_)

    held = find_held_runs(calls, engine)
    functions = find_checkpoint_functions(calls, engine, held)
    return _NameClasses(
        engine=engine,
        node=node,
        function=among(functions.names),
        checkpoint_node=among(words.nodes_of(functions.names)),
        functions=functions,
        held=held,
        optimizer=calls.matching(words.OPTIMIZER),
        plumbing=calls.matching(words.PLUMBING),
    )


def _has_checkpoint_node(calls: Calls, classes: _NameClasses) -> Bool:
    node = classes.node
    by_name = np.where(node >= 0, classes.checkpoint_node[np.maximum(node, 0)], False)
    return np.asarray(by_name[calls.name], np.bool_)
