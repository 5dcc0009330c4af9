"""Every time the engine evaluates a node: what ran in it, and what became of the nodes made there.

An evaluation is an ``autograd::engine::evaluate_function`` range (before torch 1.11, a bare node).
An operator that runs with gradients on makes a node, and has its number. The operator's
*fate* is what became of that node, and it shows recomputes:

* a reentrant checkpoint's node runs its block and then a backward pass through it: *rebuilt*
  (``torch/utils/checkpoint.py``, ``CheckpointFunction.backward``);
* what a non-reentrant checkpoint runs is asked for its saved tensors alone: *discarded*
  (``unpack_hook`` there);
* what a forward pass makes, or the gradient of a gradient, is evaluated *later*.

Each thread that makes nodes counts them separately (``torch/csrc/autograd/function.h``). Before
torch 2.4 no operator has a number under a Python dispatch mode (a selective checkpoint's, a FLOP
counter's), where the key that it is first called with is no key of autograd's
(``Dispatcher::callWithDispatchKeySlowPath``). The nodes have their numbers all the same, and in
the order of their operators; so a node with a number that no operator has belongs to an operator of
its name between the operators of the numbers before and after it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import numpy as np
from msgspec import Struct

from recompute_scan.numpy_tools import changes, places_of
from recompute_scan.recompute import vocabulary
from recompute_scan.trace.calls import Calls
from recompute_scan.trace.columns import Bool, Int8, Int32, Int64, Ints, Kind

NEVER = np.iinfo(np.int64).max
_NO_ROWS = np.empty(0, np.int64)


class Fate:
    """The fate of the nodes that a call made. Of several fates the strongest counts."""

    NONE: Final = 0  # it made none: no gradients
    DISCARDED: Final = 1  # never evaluated
    LATER: Final = 2  # by a pass that was not started for it
    HELD: Final = 3  # by a pass that another evaluation started
    REBUILT: Final = 4  # by a pass that the evaluation it ran in started


class Evaluations(Struct, frozen=True):
    """The evaluations of a trace, in order of rows, and where each call is among them.

    Attributes:
        row: Per evaluation: row of the engine's range.
        node: Row of the node in it, -1 for none.
        number: The node's number, -1 for none.
        parent: The evaluation around it, -1 for none.
        maker: Row of the call that made the node, -1 for unknown.
        made_in: The evaluation that made the run that its node goes through, itself for most.
        engine_pass: The backward pass that it belongs to.
        root_pass: That of the outermost evaluation around it.
        nested_at: When the first backward pass inside it began, ns; ``NEVER`` for none.
        by_hook: Whether a backward pass begins in it outside its node.
        of: Per call: the innermost evaluation that holds it, -1 for none.
        in_node: Whether it is in that evaluation's node, and not outside it.
        special: Whether it is the engine's range or the node itself.
        fate: A :class:`Fate`.
        through: The evaluation with the nested pass that went through its nodes, or -1.
    """

    row: Int64
    node: Int64
    number: Int64
    parent: Int64
    maker: Int64
    made_in: Int64
    engine_pass: Int64
    root_pass: Int64
    nested_at: Int64
    by_hook: Bool
    of: Int32
    in_node: Bool
    special: Bool
    fate: Int8
    through: Int32


def find_evaluations(calls: Calls) -> Evaluations:
    """The table of a trace."""
    is_op = calls.kind == Kind.OP
    named = calls.names_where(lambda name: name.startswith(vocabulary.ENGINE))
    bare = not named.any()
    named = calls.names_where(vocabulary.BARE_NODE.match) if bare else named
    row = np.flatnonzero(named[calls.name] & is_op)
    node, parent, of, in_node = _find_places(calls, row, is_op, bare)
    # A node with tensor hooks (FSDP's, say) has its number while its engine range has none, or that
    # of another node.
    number = calls.sequence[np.where(node >= 0, node, row)].astype(np.int64)
    number = np.where(number >= 0, number, calls.sequence[row])
    special = np.zeros(len(calls), np.bool_)
    special[row] = True
    special[node[node >= 0]] = True
    made = _find_making(calls, np.flatnonzero(is_op & (calls.sequence >= 0) & ~special))
    maker = _find_makers(calls, row, number, parent, of, made)
    fate, through = _find_fates(calls, row, maker, parent, of, made)
    made_in = np.arange(len(row))
    # A nested pass also goes through nodes of the forward pass: FSDP's views of flat parameters.
    held = np.flatnonzero((fate == Fate.HELD) & (of >= 0))
    made_in[through[held]] = of[held]
    for rows in calls.levels_up():  # a call stands for all that it holds
        some = rows[(fate[rows] > Fate.NONE) & ~special[rows]]
        above = calls.parent[some]
        np.maximum.at(fate, above, fate[some])
        np.maximum.at(through, above, through[some])
    fate[special], through[special] = Fate.NONE, -1
    nested = np.flatnonzero(parent >= 0)
    outer = parent[nested]
    nested_at = np.full(len(row), NEVER)
    np.minimum.at(nested_at, outer, calls.start[row[nested]])
    inside = (node[outer] >= 0) & (row[nested] > node[outer])
    inside &= row[nested] <= node[outer] + calls.size[node[outer]]
    by_hook = np.zeros(len(row), np.bool_)
    by_hook[outer[~inside]] = True
    plain = is_op & ~special if not bare else np.zeros(len(calls), np.bool_)
    passes = _find_passes(calls, row, number, parent, of, maker, plain)
    return Evaluations(
        row=row,
        node=node,
        number=number,
        parent=parent,
        maker=maker,
        made_in=made_in,
        engine_pass=passes,
        root_pass=passes[np.maximum.accumulate(np.where(parent < 0, np.arange(len(row)), 0))],
        nested_at=nested_at,
        by_hook=by_hook,
        of=of,
        in_node=in_node,
        special=special,
        fate=fate,
        through=through,
    )


def nodes_of_ranges(calls: Calls) -> Int64:
    """By the code of an engine range's name: its node's, or -1; -1 for all other names."""
    codes = {vocabulary.ENGINE + name: code for code, name in enumerate(calls.names)}
    return np.array([codes.get(name, -1) for name in calls.names], np.int64)


def _find_places(
    calls: Calls, row: Int64, is_op: Bool, bare: bool
) -> tuple[Int64, Int64, Int32, Bool]:
    """Of each evaluation the node and the one around it; of each call where it is among them."""
    node_of = nodes_of_ranges(calls)
    index = np.full(len(calls), -1, np.int32)
    index[row] = np.arange(len(row))
    # A call in no other has row -1 for its parent: what is behind the last.
    of, in_node = np.full(len(calls) + 1, -1, np.int32), np.zeros(len(calls) + 1, np.bool_)
    node = row.copy() if bare else np.full(len(row), -1, np.int64)
    parent = np.full(len(row), -1, np.int64)
    for rows in calls.levels():
        above = calls.parent[rows].astype(np.intp)
        around, inside = of[above], in_node[above]
        begins = index[rows] >= 0
        own = index[rows[begins]]
        parent[own] = around[begins]
        around[begins], inside[begins] = own, bare
        here = np.flatnonzero((around >= 0) & ~inside & ~begins & is_op[rows])
        here = here[calls.name[rows[here]] == node_of[calls.name[row[around[here]]]]]
        node[around[here]] = rows[here]
        inside[here] = True
        of[rows], in_node[rows] = around, inside
    return node, parent, of[:-1], in_node[:-1]


def _find_making(calls: Calls, rows: Int64) -> Int64:
    """Of these numbered calls those that made a node, and those that hold one of the same number.

    What makes none, such as a function's call without gradients, bears the number of the next that
    does (``torch/csrc/autograd/python_function.cpp``, ``THPFunction_apply``).
    """
    order = rows[np.lexsort((rows, calls.sequence[rows], calls.thread[rows]))]
    last = changes(calls.thread[order], calls.sequence[order])
    ends = np.append(np.flatnonzero(last)[1:], len(order)) - 1
    final = order[ends[last.cumsum() - 1]]
    return np.sort(order[order + calls.size[order] >= final])


def _find_makers(
    calls: Calls, row: Int64, number: Int64, parent: Int64, of: Int32, made: Int64
) -> Int64:
    """The last call of a node's number before its evaluation: what makes none bears the next one's.

    Numbers are one thread's. Where several threads have it, the call in the enclosing evaluation
    made the node, else one outside all evaluations; and where the trace says which thread made it
    (``Fwd thread id``, ``torch/csrc/autograd/function.h``, ``thread_id``), no other did.
    """
    best, score = np.full(len(row), -1, np.int64), np.full(len(row), -1, np.int64)
    of_threads = {}
    known = np.flatnonzero(number >= 0)
    by_number = known[number[known].argsort(kind="stable")]
    ascending = number[by_number].astype(calls.sequence.dtype)
    made = made[np.isin(calls.sequence[made], ascending)]
    for thread, places in places_of(calls.thread[made]).items():
        mine = made[places]  # in order of time
        bears = np.isin(ascending, calls.sequence[mine])
        asked = by_number[bears]
        order = np.concatenate((mine, row[asked]))
        numbers = np.concatenate((calls.sequence[mine], ascending[bears])).astype(np.int64)
        asks = np.arange(len(order)) >= len(mine)
        times = calls.start[order]
        # Of equal times an outer call comes first, and what asks last but for what is inside.
        sort = np.lexsort((order, times, numbers))
        last = np.maximum.accumulate(np.where(asks[sort], -1, np.arange(len(sort))))
        found = np.where(last >= 0, order[sort[np.maximum(last, 0)]], -1)[asks[sort]]
        ask = asked[sort[asks[sort]] - len(mine)]
        known = (found >= 0) & (calls.sequence[found] == number[ask])
        ask, found = ask[known], found[known]
        value = 2 * (of[found] == parent[ask]) + (of[found] < 0)
        better = value > score[ask]
        best[ask[better]], score[ask[better]] = found[better], value[better]
        of_threads[thread] = ask, found
    if calls.made_by is None or len(of_threads) < 2:
        return best
    said = calls.made_by[row]
    for one, places in places_of(np.where(best >= 0, said, -1)).items():
        if one < 0:
            continue
        # Autograd counts threads in another order. The thread with most of the numbers is the one.
        ask, found = of_threads[int(np.bincount(calls.thread[best[places]]).argmax())]
        best[places] = -1
        its = said[ask] == one
        best[ask[its]] = found[its]
    return best


def _find_fates(
    calls: Calls, row: Int64, maker: Int64, parent: Int64, of: Int32, made: Int64
) -> tuple[Int8, Int32]:
    fate, through = np.zeros(len(calls), np.int8), np.full(len(calls), -1, np.int32)
    fate[made[of[made] >= 0]] = Fate.DISCARDED
    known = np.flatnonzero(maker >= 0)
    home, into = of[maker[known]].astype(np.int64), parent[known]
    value = np.where(into < 0, Fate.LATER, Fate.HELD)
    # A pass around the evaluation that it ran in, as of a forward pass inside a recompute.
    first, begin = row[np.maximum(into, 0)], row[np.maximum(home, 0)]
    around = (home >= 0) & (first <= begin) & (begin <= first + calls.size[first])
    value[around & (into >= 0)] = Fate.LATER
    value[(home == into) & (into >= 0)] = Fate.REBUILT
    np.maximum.at(fate, maker[known], value.astype(np.int8))
    strong = value >= Fate.HELD
    through[maker[known[strong]]] = into[strong]
    return fate, through


def _find_passes(
    calls: Calls, row: Int64, number: Int64, parent: Int64, of: Int32, maker: Int64, plain: Bool
) -> Int64:
    """The backward pass of each evaluation, by number.

    Within a pass nothing runs between two evaluations, and the numbers of a thread only fall: the
    ready queue hands out the highest first, and what becomes ready through a node is older than
    the node (``torch/csrc/autograd/engine.cpp``, ``CompareNodeTaskTime``). So an operator that the
    engine's thread or the asking one ran between begins a pass, and so does a number that does not
    fall. No range of the engine's says which pass it is.
    """
    if not len(row):
        return np.zeros(0, np.int64)
    threads = np.unique(calls.thread[row])
    if (maker >= 0).any():
        asking = np.bincount(calls.thread[maker[maker >= 0]]).argmax()
        threads = np.append(threads, np.array([asking], threads.dtype))
    ops = np.flatnonzero(plain & np.isin(calls.thread, threads))
    ops = ops[np.isin(of[ops], np.unique(parent).astype(of.dtype))]
    order = np.lexsort((calls.start[row], parent))
    both = np.concatenate((row[order], ops))
    group = np.concatenate((parent[order], of[ops].astype(np.int64)))
    sort = np.lexsort((calls.start[both], group))
    is_op = sort >= len(row)
    seen = is_op.cumsum()[~is_op]  # operators before each evaluation, in order
    breaks = changes(parent[order], seen)
    numbered = np.flatnonzero(number[order] >= 0)
    one = order[numbered]
    again = np.lexsort((numbered, calls.thread[row[one]], parent[one]))
    here, before = numbered[again[1:]], numbered[again[:-1]]
    rises = number[order[here]] >= number[order[before]]
    rises &= parent[order[here]] == parent[order[before]]
    rises &= calls.thread[row[order[here]]] == calls.thread[row[order[before]]]
    began = np.maximum.accumulate(np.where(breaks, np.arange(len(row)), 0))
    last = -1
    for at, previous in sorted(zip(here[rises].tolist(), before[rises].tolist(), strict=True)):
        if max(last, int(began[at])) <= previous:
            breaks[at], last = True, at
    passes = np.empty(len(row), np.int64)
    passes[order] = breaks.cumsum() - 1
    return passes


def numbers_of(calls: Calls, operators: Bool, evaluations: Evaluations) -> tuple[Ints, Int64]:
    """The sequence number of each call, -1 for none; and rows of those that got their node's.

    An outermost operator without one (TorchScript) has the lowest inside it, an engine range its
    node's.
    """
    own = calls.sequence.copy()
    nodes = evaluations.node[evaluations.node >= 0]
    nodes = nodes[calls.sequence[nodes] >= 0]
    filled = _fill_in(calls, own, operators & (evaluations.of < 0), evaluations.of, nodes)
    none = np.iinfo(own.dtype).max
    lowest = np.where(own < 0, none, own)
    for rows in calls.levels_up():
        np.minimum.at(lowest, calls.parent[rows], lowest[rows])
    number: Ints = own.copy()
    np.copyto(number, lowest, where=operators & (own < 0) & (lowest < none))
    number[evaluations.row] = evaluations.number
    return number, filled


def under_a_mode(calls: Calls, rows: Int64) -> Bool:
    """For each of these operators: does it hold a twin?"""
    return calls.holding(twins_of(calls), rows) > 0


def twins_of(calls: Calls) -> Bool:
    """For each call: is it an operator that stands directly in one of the same name?

    A dispatch mode, which selective checkpointing uses, records each operator twice, one in
    the other (since torch 2.13 with a range between); one that returns a saved result has
    no inner one.
    """
    mode = calls.where(vocabulary.DISPATCH_MODE.__eq__)
    above = np.maximum(calls.parent, 0)
    beyond = np.flatnonzero(mode[above] & (calls.parent[above] >= 0))
    above[beyond] = calls.parent[above[beyond]]
    twin = (calls.parent >= 0) & (calls.name == calls.name[above]) & (calls.kind == Kind.OP)
    return np.asarray(twin)


def _fill_in(calls: Calls, number: Ints, forward: Bool, of: Int32, nodes: Int64) -> Int64:
    """Give operators of the forward pass the numbers of the nodes that they made, in place."""
    numbered = np.flatnonzero((of < 0) & (number >= 0) & (calls.kind == Kind.OP))
    unnumbered = np.flatnonzero(forward & (number < 0))
    orphans = nodes[~np.isin(number[nodes], number[numbered])]
    if not len(unnumbered) or not len(numbered) or not len(orphans):
        return _NO_ROWS
    makers = _by_operator(calls, unnumbered[under_a_mode(calls, unnumbered)])
    orphans = orphans[np.unique(number[orphans], return_index=True)[1]]
    numbered = numbered[number[numbered].argsort(kind="stable")]
    at = np.searchsorted(number[numbered], number[orphans])
    first = np.where(at > 0, numbered[at - 1], -1)
    until = np.append(numbered, len(calls))[at]
    filled, place = [], 0
    for node, begin, end in zip(orphans.tolist(), first.tolist(), until.tolist(), strict=True):
        rows = makers.get(vocabulary.plain(calls.called(node).partition("Backward")[0]), [])
        place = max(place, begin + 1)
        here = bisect_left(rows, place)
        if here < len(rows) and rows[here] < end:
            maker = rows[here]
            number[maker] = number[node]
            place = maker + 1 + int(calls.size[maker])
            filled.append(maker)
    return np.array(filled, np.int64)


def _by_operator(calls: Calls, rows: Int64) -> dict[str, list[int]]:
    """Rows of these calls and of all inside them, in order, by what their nodes are called."""
    plain = [vocabulary.plain(name) for name in calls.names]
    found: dict[str, list[int]] = defaultdict(list)
    for row in np.flatnonzero(calls.within(rows)).tolist():
        found[plain[calls.name[row]]].append(row)
    return found


# Calls looked at for each name: one function does the same in every call.
_ENOUGH = 8
_PRODUCTS = frozenset({"aten::matmul", "aten::mm", "aten::bmm"})


class CheckpointFunctions(Struct, frozen=True):
    """The autograd functions in one trace, and which of them are checkpoints.

    Attributes:
        names: All of them, those known by name among them.
        in_parts: Functions with a node that goes back and forth: it runs a part again, and its
            backward pass, then the next. A model's own design, such as a reversible chain, and no
            switch that somebody left on.
        losses: Functions that do so and end the forward pass, such as a head with its loss in
            chunks. They run again their formula: they are no checkpoints, and not
            among ``names``.
        called: By the code of the name of a node, or of the engine's range around one: the code of
            its function, except checkpoints that are known by name; or -1.
    """

    names: frozenset[str]
    in_parts: frozenset[str]
    losses: frozenset[str]
    called: Int64

    @property
    def written(self) -> Int64:
        """The codes of all functions in ``called``."""
        return np.unique(self.called[self.called >= 0])


def find_checkpoint_functions(calls: Calls, evaluations: Evaluations) -> CheckpointFunctions:
    """The checkpoint functions of a trace."""
    known = frozenset(vocabulary.CHECKPOINT_FUNCTIONS)
    functions = _called_functions(calls)
    # For each evaluation: the function that made its node.
    going = functions[calls.name[evaluations.row]]
    own = (evaluations.maker >= 0) & (calls.name[evaluations.maker] == going)
    going = np.where(own, going, -1)
    rows = np.flatnonzero(evaluations.through >= 0)
    goes = evaluations.through[rows]
    rows, goes = rows[going[goes] >= 0], goes[going[goes] >= 0]
    every = np.unique(going[goes]).tolist()
    found = [f for f in every if _go_through_all(calls, evaluations, rows, goes, going == f)]
    again = (evaluations.of[rows] == goes) & (calls.start[rows] >= evaluations.nested_at[goes])
    in_parts = np.unique(going[goes[again & np.isin(going[goes], found)]])
    parts = frozenset(in_parts.tolist())
    losses = {f for f in parts if _are_losses(calls, evaluations, np.flatnonzero(going == f))}

    def named(codes: Iterable[int]) -> frozenset[str]:
        return frozenset(calls.names[code] for code in codes)

    names = known | named({*found} - losses)
    return CheckpointFunctions(names, named(parts - losses), named(losses), functions)


def _go_through_all(
    calls: Calls, evaluations: Evaluations, rows: Int64, goes: Int32, mine: Bool
) -> bool:
    """Do most of a function's nodes go through the last heavy work of their calls?

    A backward pass begins where the call's result was made; a function may run less than that for
    its formula.
    """
    judged = []
    for one in np.unique(goes[mine[goes]])[:_ENOUGH].tolist():
        last = _last_work(calls, int(evaluations.maker[one]))
        judged.append(last < 0 or bool(calls.sums(calls.name == last, rows[goes == one]).any()))
    return 2 * sum(judged) > len(judged)


def _last_work(calls: Calls, own: int) -> int:
    """Code of the last operator in a call that is heavy work of a forward pass; -1 for none."""
    inside = np.arange(own + 1, own + 1 + calls.size[own])
    codes = calls.name[inside[calls.kind[inside] == Kind.OP]][::-1]
    heavy = (
        code
        for code in codes.tolist()
        if vocabulary.forward_only(calls.names[code]) or calls.names[code] in _PRODUCTS
    )
    return next(heavy, -1)


def _called_functions(calls: Calls) -> Int64:
    """``CheckpointFunctions.called``; compiled code is no function that somebody wrote."""
    codes = {name: code for code, name in enumerate(calls.names)}
    found = np.full(len(codes), -1, np.int64)
    for name, code in codes.items():
        node = codes.get(f"{name}Backward", -1)
        known = name in vocabulary.CHECKPOINT_FUNCTIONS or vocabulary.COMPILED_CALL.match(name)
        if node >= 0 and not known:
            found[[node, codes.get(f"{vocabulary.ENGINE}{name}Backward", node)]] = code
    return found


def _are_losses(calls: Calls, evaluations: Evaluations, nodes: Int64) -> bool:
    """Did the forward pass end with each of these nodes' calls: nothing heavy after, or to reduce?

    A backward pass begins at one number, so either the call made it, or something after it did.
    """
    roots = nodes[evaluations.of[evaluations.maker[nodes]] < 0][:_ENOUGH]
    ends = [vocabulary.forward_only(n) or bool(vocabulary.REDUCES.match(n)) for n in calls.names]
    ends_pass = np.array(ends, np.bool_)[calls.name] & (calls.kind == Kind.OP)
    for one in roots.tolist():
        own, node = evaluations.maker[one], evaluations.row[one]
        after: Bool = ends_pass & (calls.start >= calls.end[own]) & (calls.sequence >= 0)
        if (after & (calls.start < calls.start[node]) & (calls.thread == calls.thread[own])).any():
            return False
    return len(roots) > 0
