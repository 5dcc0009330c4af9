"""The role of each outermost operator: forward work, a recompute, or backward work.

One ordered table of rules (:data:`RULES`) decides, by where an operator ran among the evaluations
of autograd nodes and by what became of the nodes that it made
(:mod:`recompute_scan.recompute.evaluations`). The first rule that holds counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Final

import numpy as np
from msgspec import Struct

from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.evaluations import (
    NEVER,
    CheckpointFunctions,
    Evaluations,
    Fate,
    find_checkpoint_functions,
    find_evaluations,
    numbers_of,
    under_a_mode,
)
from recompute_scan.trace.calls import Calls, Kernels
from recompute_scan.trace.columns import Bool, Int8, Int32, Int64, Ints, Kind

# Of so few operators that a function's node runs, its own call alone can be its gradient.
_ADJOINT = 3


class Role:
    """The role of a call. Plain numbers: NumPy compares an enumeration's more slowly."""

    INNER: Final = 0  # inside a call that has a role
    FORWARD: Final = 1  # forward work
    RECOMPUTE: Final = 2  # forward work again, for a checkpoint
    RANGE: Final = 3  # looked through: annotations, checkpoint functions
    BACKWARD: Final = 4  # the engine's range around one node
    FORMULA: Final = 5  # the node itself, what its formula runs, or a gradient hook
    OPTIMIZER: Final = 6
    PLUMBING: Final = 7  # communication and resharding
    BY_DESIGN: Final = 8  # forward work again, as a function or a model is made
    OWN_WORK: Final = 9  # work of a checkpoint function outside its block


def roles_in(*roles: int) -> Bool:
    """For each role: is it one of these?"""
    found = np.zeros(Role.OWN_WORK + 1, np.bool_)
    found[list(roles)] = True
    return found


# For each role: what is looked through; forward work run again; it, or its first run.
LOOKED_THROUGH = roles_in(Role.RANGE, Role.BACKWARD)
AGAIN = roles_in(Role.RECOMPUTE, Role.BY_DESIGN, Role.OWN_WORK)
OPERATORS = AGAIN | roles_in(Role.FORWARD)
# These make the nodes that ask for recomputes.
MAKES = OPERATORS | roles_in(Role.RANGE)


class Structure(Struct, frozen=True):
    """One entry per call.

    Attributes:
        role: A :class:`Role`.
        engine: Row of the innermost engine range that holds the call (itself for one), or -1.
        top: Row of the outermost operator with a role that holds the call, or -1.
        function: Row of the innermost checkpoint function *inside the same engine range* that
            holds the call, or -1.
        outer_function: Row of the outermost such function.
        checkpoint_node: For engine ranges: is its node a checkpoint function's?
        functions: The checkpoint functions in the trace, by name.
        number: Autograd's sequence number of the call; for an outermost operator without one
            (TorchScript), the lowest inside it; for an engine range, its node's; -1 for none.
        roots: Rows of the engine ranges that are in no other, in order.
        filled: Rows of the operators without a number: ``number`` has the one of their node.
    """

    calls: Calls
    role: Int8
    engine: Int32
    top: Int32
    function: Int32
    outer_function: Int32
    checkpoint_node: Bool
    functions: CheckpointFunctions
    number: Ints
    roots: Int64
    filled: Int64
    evaluations: Evaluations

    def rows(self, role: int) -> Int64:
        """Rows with that role, in order."""
        return np.flatnonzero(self.role == role)


class Work(Struct, frozen=True):
    """Per call: what it and all inside it cost.

    Attributes:
        time: ns; time of the kernels it launched where the trace has a GPU, else its own
            duration on the host.
        kernels: Number of kernels it launched.
        on_gpu: Whether ``time`` is kernel time.
        unlaunched: Kernels without a record of their launch: belonging to no call.
        queued: Of these, those that were launched before recording began: belonging to no step.
    """

    time: Int64
    kernels: Int32
    on_gpu: bool
    unlaunched: int
    queued: int


def measure(structure: Structure, kernels: Kernels) -> Work:
    """The work of every call that is a top (see ``Structure.top``)."""
    calls = structure.calls
    launched = kernels.launch >= 0
    unlaunched, queued = int((~launched).sum()), int(kernels.queued.sum())
    if not launched.any():
        # One zero, read as many.
        none = np.broadcast_to(np.int32(0), len(calls))
        return Work(calls.duration, none, False, unlaunched, queued)
    count = np.zeros(len(calls), np.int32)
    time = np.zeros(len(calls), np.int64)
    top = structure.top[kernels.launch[launched]]
    known = top >= 0
    np.add.at(count, top[known], 1)
    np.add.at(time, top[known], kernels.time[launched][known])
    return Work(time, count, True, unlaunched, queued)


class Operators:
    """The outermost operators of a trace, as the rules see them; one entry each.

    Args:
        calls: The trace's calls.
        table: Its evaluations.
        functions: Its checkpoint functions.
        rows: Rows of the operators.
        call: ``Structure.outer_function``.
        optimizer: For each call: is it an optimizer's?
        moded: For each call: is it a recompute that has no number, as under a dispatch mode?
    """

    def __init__(
        self,
        calls: Calls,
        table: Evaluations,
        functions: CheckpointFunctions,
        rows: Int64,
        call: Int32,
        optimizer: Bool,
        moded: Bool,
    ) -> None:
        self.calls, self.table, self.rows = calls, table, rows
        self._functions = functions
        self.optimizer = optimizer[rows]
        self.moded = moded[rows]
        self.home = table.of[rows]
        self.begin = calls.start[rows]
        # Operators in a function's call make no nodes: they share the fate of the call.
        self.fate = table.fate[np.where(call[rows] >= 0, call[rows], rows)]
        self.graded = self.fate > Fate.NONE
        # With gradients on, what makes no node bears the number of the next that does.
        written = np.isin(calls.name[rows], functions.written)
        self.numbered = (calls.sequence[rows] >= 0) & ~written
        self.in_backward = self.home >= 0
        self.plumbing = calls.where(vocabulary.PLUMBING.match)[rows]
        self.in_checkpoint = self.in_node_of(functions.names)
        self.in_parts = self.in_node_of(functions.in_parts)
        # Does a backward pass begin in its evaluation outside the node?
        self.by_hook = np.append(table.by_hook, False)[self.home]
        # Did it begin before the first backward pass in its evaluation?
        self.before_nested = self.begin < np.append(table.nested_at, 0)[self.home]
        # Did it begin no earlier than the first operator that its own evaluation goes through?
        self.rebuilding = self.begin >= self.first(self.fate == Fate.REBUILT)

    @cached_property
    def beside(self) -> Bool:
        """Is it in an evaluation and not in its node, as gradient hooks are, or adds a gradient?"""
        beside = ~self.table.in_node[self.rows] & np.append(self.table.node >= 0, False)[self.home]
        return np.asarray(
            beside | self.in_node_of({vocabulary.function_of(vocabulary.ACCUMULATE_GRAD)})
        )

    @cached_property
    def held_beside(self) -> Bool:
        """Is it outside a node, and not behind the last that a nested pass goes through?"""
        last = self.last(self.beside & (self.fate >= Fate.HELD))
        return np.asarray(self.beside & (self.begin <= last))

    @cached_property
    def surrounded(self) -> Bool:
        """Is it of a block that the node goes through around it? torch's runs nothing else."""
        goes = self.in_checkpoint & (self.fate >= Fate.HELD)
        between = (self.begin > self.first(goes)) & (self.begin < self.last(goes))
        return np.asarray(self.in_node_of({vocabulary.TORCHS_FUNCTION}) | between)

    @cached_property
    def asked(self) -> Bool:
        """Did it begin no later than the last operator that a saved tensor was asked of?

        A recompute comes before the formula that asked for it, and makes nodes that are
        never evaluated. In a pass that keeps its graph formulas make such nodes too, and there a
        recompute keeps each tensor that a node asks for, detached inside the operator that saves
        it.
        """
        asked = (self.fate == Fate.DISCARDED) | (self.fate == Fate.HELD)
        table = self.table
        later = table.of[(table.fate == Fate.LATER) & (table.of >= 0)]
        keeping = np.isin(table.engine_pass, np.unique(table.engine_pass[later]))
        detached = self.calls.holding(self.calls.where(vocabulary.DETACH.__eq__), self.rows) > 0
        asked &= ~np.append(keeping, False)[self.home] | detached
        asked &= (self.fate == Fate.HELD) | ~self._of_gradient()
        return np.asarray(self.begin <= self.last((asked | self.moded) & ~self.beside))

    def _of_gradient(self) -> Bool:
        """Is it what a function's own gradient runs again of other functions?

        Where a node asks a checkpoint for a tensor, the checkpoint holds the call that saved it. So
        if the node of a function that somebody wrote does not run its own call, no checkpoint asked
        for the operators that it runs. Where it does, a checkpoint's recompute ends with that, but
        for work that its call does not hold.
        """
        calls, table = self.calls, self.table
        own, written = self._functions.called, self._functions.written
        functions = np.flatnonzero(np.isin(calls.name, written) & (calls.kind == Kind.OP))
        own = np.where(np.isin(own, np.unique(calls.name[functions])), own, -1)
        function = np.append(own[calls.name[table.row]], -1)
        last = np.full(len(function), -1, np.int64)
        inside = functions[table.of[functions] >= 0]
        mine = inside[calls.name[inside] == function[table.of[inside]]]
        last[table.of[mine]] = mine
        # A function that is its own adjoint runs nothing else (an all-to-all).
        ends = self.last(self.in_backward)
        few = np.bincount(self.home[self.in_backward], minlength=len(function)) <= _ADJOINT
        own_call: Int64 = last[self.home]
        own_call[few[self.home] & (calls.start[own_call] >= ends)] = -1
        found: Bool = (function[self.home] >= 0) & (own_call < 0)
        behind = np.flatnonzero((own_call >= 0) & (self.rows > own_call + calls.size[own_call]))
        behind = behind[np.isin(calls.name[self.rows[behind]], written)]
        for place in behind.tolist():
            call = int(own_call[place])
            held = calls.name[call + 1 : call + 1 + calls.size[call]]
            found[place] = calls.name[self.rows[place]] in held
        return found

    def in_node_of(self, functions: Collection[str]) -> Bool:
        """Is it in an evaluation of a node of these functions?"""
        known = _of_functions(self.calls, self.table, functions)
        return np.append(known, False)[self.home]

    def last(self, holds: Bool) -> Int64:
        """For each: when the last operator of its evaluation began for which this holds; or -1."""
        found = np.full(len(self.table.row) + 1, -1, np.int64)
        np.maximum.at(found, self.home[holds], self.begin[holds])
        return found[self.home]

    def first(self, holds: Bool) -> Int64:
        """For each: when the first one did; or ``NEVER``."""
        found = np.full(len(self.table.row) + 1, NEVER)
        np.minimum.at(found, self.home[holds], self.begin[holds])
        return found[self.home]


class Rule(Struct, frozen=True):
    """An operator for which it ``holds``, and no rule before it, has the ``role``.

    A ``case`` of ``tests/recompute/test_rules.py`` is answered wrongly without it.
    """

    name: str
    role: int
    holds: Callable[[Operators], Bool]
    case: str


RULES: Final = (
    # FSDP gathers in its forward and in its backward: it would look like recomputed work.
    Rule("1 plumbing", Role.PLUMBING, lambda o: o.plumbing, "doubled_llama_fsdp"),
    # An update runs without gradients and in no evaluation, as what a closure holds does.
    Rule("1 optimizer", Role.OPTIMIZER, lambda o: o.optimizer, "r_outside"),
    # In no evaluation: ``Engine::evaluate_function`` runs whatever a backward pass runs.
    Rule("2 forward", Role.FORWARD, lambda o: ~o.in_backward, "n_outside"),
    # A hook may begin a pass through what it ran: a loss that is worked out in its gradient's hook.
    Rule("3 hook's pass", Role.BY_DESIGN, lambda o: o.held_beside & o.by_hook, "gradient_caching"),
    # Or it runs what the node behind it goes through (``call_tensor_pre_hooks``, engine.cpp).
    Rule("3 hook before a node", Role.RECOMPUTE, lambda o: o.held_beside, "hooked_block"),
    # Else hooks ask for no saved tensor, nor does the sum of a parameter's gradients.
    Rule("3 outside a node", Role.FORMULA, lambda o: o.beside, "hook_before_recompute"),
    # A function that goes back and forth runs each part again for its own gradient.
    Rule(
        "4 in parts", Role.BY_DESIGN, lambda o: o.in_parts & o.graded & o.rebuilding, "tiles_in_n"
    ),
    # ``CheckpointFunction.backward`` runs its block with gradients on.
    Rule(
        "4 checkpoint",
        Role.RECOMPUTE,
        lambda o: o.in_checkpoint & (o.graded | (o.numbered & o.before_nested)),
        "stash",
    ),
    # Operators of a block without gradients are between others, and before the nested pass.
    Rule(
        "4 ungraded",
        Role.RECOMPUTE,
        lambda o: o.in_checkpoint & ~o.in_parts & o.surrounded & o.before_nested,
        "notes",
    ),
    # Such as an input that a function brings back, or an inverse.
    Rule("4 own work", Role.OWN_WORK, lambda o: o.in_checkpoint, "looks_twice"),
    # ``unpack_hook`` runs the block in whichever node asks first.
    Rule("5 asked for", Role.RECOMPUTE, lambda o: o.asked, "n_outside"),
    Rule("6 formula", Role.FORMULA, lambda o: o.in_backward, "no_checkpoint"),
)


def classify(calls: Calls, rules: Sequence[Rule] = RULES) -> Structure:
    """The role of every call; see :class:`Structure`."""
    evaluations = find_evaluations(calls)
    functions = find_checkpoint_functions(calls, evaluations)
    closures, optimizer = _optimizers(calls)
    role, function, outer = _find_outermost(calls, evaluations, functions, closures, optimizer)
    _add_updates(calls, evaluations, closures, optimizer)
    operator = (role == Role.FORWARD) & (calls.kind == Kind.OP) & ~optimizer
    number, filled = numbers_of(calls, operator, evaluations)
    rows = np.flatnonzero(role == Role.FORWARD)
    moded = np.zeros(len(calls), np.bool_)
    if len(filled):
        asking = np.append(np.isin(evaluations.number, number[filled].astype(np.int64)), False)
        some = rows[asking[evaluations.of[rows]] & (calls.sequence[rows] < 0)]
        moded[some] = under_a_mode(calls, some)
    operators = Operators(calls, evaluations, functions, rows, outer, optimizer, moded)
    decided = np.full(len(rows), Role.INNER, np.int8)
    for rule in rules:
        decided[(decided == Role.INNER) & rule.holds(operators)] = rule.role
    role[rows] = decided
    engine = np.append(evaluations.row, -1)[evaluations.of].astype(np.int32)
    checkpoint_node = np.zeros(len(calls), np.bool_)
    checkpoint_node[evaluations.row] = _of_functions(calls, evaluations, functions.names)
    return Structure(
        calls=calls,
        role=role,
        engine=engine,
        top=_tops(calls, role),
        function=function,
        outer_function=outer,
        checkpoint_node=checkpoint_node,
        functions=functions,
        number=number,
        roots=evaluations.row[evaluations.parent < 0],
        filled=filled,
        evaluations=evaluations,
    )


def _find_outermost(
    calls: Calls,
    evaluations: Evaluations,
    functions: CheckpointFunctions,
    closures: Int64,
    optimizer: Bool,
) -> tuple[Int8, Int32, Int32]:
    """Per call: its role by its place, and functions' calls around it; see :class:`Structure`.

    An operator in nothing but what is looked through has the role ``FORWARD``.
    """
    size = len(calls)
    is_op = calls.kind == Kind.OP
    begins = np.zeros(size, np.bool_)
    begins[evaluations.row] = True
    is_function = calls.where(functions.names.__contains__) & is_op
    plumbing = calls.where(vocabulary.PLUMBING.match) & (calls.kind != Kind.RUNTIME)
    through = (calls.kind == Kind.ANNOTATION) | is_function | evaluations.special
    through |= _broken_regions(calls)
    # A call that holds evaluations and is no autograd function is a range: ``torch.compile`` puts
    # ranges around the functions that it was given and what they call, with the backward passes
    # that these start.
    ranges = np.flatnonzero((calls.size > 0) & (calls.sequence < 0))
    through[ranges] |= calls.holding(begins, ranges) > 0
    through &= ~plumbing & ~optimizer
    through[closures] = True
    through |= evaluations.special
    counts = is_op | optimizer | plumbing
    checkpoints = _of_functions(calls, evaluations, functions.names)
    of_checkpoint = np.append(checkpoints, False)[evaluations.of]
    # A call in no other has row -1 for its parent: what is behind the last.
    role = np.full(size + 1, Role.INNER, np.int8)
    opened = np.ones(size + 1, np.bool_)
    function = np.full(size + 1, -1, np.int32)
    outer = np.full(size + 1, -1, np.int32)
    for rows in calls.levels():
        above = calls.parent[rows].astype(np.intp)
        function[rows], outer[rows] = function[above], outer[above]
        opened[rows] = False
        some = np.flatnonzero(opened[above] | begins[rows])
        if not len(some):
            continue
        free = rows[some]
        special, looked = evaluations.special[free], through[free]
        function[free[special]] = outer[free[special]] = -1
        own = free[looked & is_function[free] & ~special]
        function[own] = own
        own = own[outer[own] < 0]
        outer[own] = own
        role[free[looked]] = Role.RANGE
        role[free[special & ~of_checkpoint[free]]] = Role.FORMULA
        role[free[begins[free]]] = Role.BACKWARD
        role[free[~looked & counts[free]]] = Role.FORWARD
        opened[free] = looked
    return role[:-1], function[:-1], outer[:-1]


def _optimizers(calls: Calls) -> tuple[Int64, Bool]:
    """Rows of optimizer ranges that hold forward work; and for each call: is it another such range?

    ``optimizer.step(closure)`` holds it; Lightning steps so by default. An update itself runs
    without gradients, so its operators have no sequence numbers.
    """
    optimizer = calls.where(vocabulary.OPTIMIZER.match)
    ranges = np.flatnonzero(optimizer)
    numbered = (calls.sequence >= 0) & (calls.kind == Kind.OP)
    closures = ranges[calls.holding(numbered, ranges) > 0]
    optimizer[closures] = False
    return closures, optimizer


def _add_updates(calls: Calls, evaluations: Evaluations, closures: Int64, optimizer: Bool) -> None:
    """Add what follows the closure in an optimizer's range to ``optimizer``, in place."""
    engines, of = evaluations.row, evaluations.of
    for row in closures.tolist():
        inside = np.arange(row + 1, row + 1 + calls.size[row])
        # On a GPU the backward pass runs in another thread, and the closure waits for it.
        began = calls.start[engines]
        within = engines[(began >= calls.start[row]) & (began < calls.end[row])]
        last = inside[(calls.sequence[inside] >= 0) & (calls.kind[inside] == Kind.OP)]
        update = max(calls.end[within].max(initial=0), calls.end[last].max(initial=0))
        optimizer[inside[(of[inside] < 0) & (calls.start[inside] >= update)]] = True


def _broken_regions(calls: Calls) -> Bool:
    """For each call: is it a compiled region that a graph break divides, or that runs in Python?

    It holds other regions, or operators with numbers outside compiled functions. All
    versions of its code are looked through, so that a recompute looks like its forward.
    """
    region = calls.where(vocabulary.COMPILED_REGION.match)
    rows = np.flatnonzero(region)
    if not len(rows):
        return region
    hidden = calls.within(calls.named(vocabulary.COMPILED_FUNCTION))
    own = (calls.sequence >= 0) & (calls.kind == Kind.OP) & ~hidden
    divided = rows[calls.sums(own | region, rows) > 1]
    alike = vocabulary.same_work(calls.names)[calls.name]
    return region & np.isin(alike, alike[divided])


class OperatorCodes:
    """One number per call, equal for calls of equal (or alike) name, shapes and types.

    ``codes[rows]`` computes the codes of some rows; they are not kept.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._signatures = int(calls.dims.max(initial=0)) + 1
        self._kind = vocabulary.same_work(calls.names) * self._signatures

    def __getitem__(self, rows: Ints) -> Int64:
        codes: Int64 = self._kind[self._calls.name[rows]] + self._calls.dims[rows]
        return codes

    def names(self, codes: Int64) -> Int64:
        """One number per code, equal for equal (or alike) names."""
        return codes // self._signatures


def _tops(calls: Calls, role: Int8) -> Int32:
    """Row of the outermost operator with a role around each call; a node stands for its formula."""
    top = np.full(len(calls) + 1, -1, np.int32)  # see `_find_outermost`
    for rows in calls.levels():
        above = top.take(calls.parent[rows])
        own = role[rows]
        within = (own == Role.INNER) | ((own == Role.FORMULA) & (above >= 0))
        top[rows] = np.where(LOOKED_THROUGH[own], -1, np.where(within, above, rows))
    return top[:-1]


def _of_functions(calls: Calls, evaluations: Evaluations, functions: Collection[str]) -> Bool:
    """For each evaluation: is its node one of these functions'?"""
    return calls.where(lambda name: vocabulary.function_of(name) in functions)[evaluations.row]
