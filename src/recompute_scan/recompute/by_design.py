"""Forward work that a model runs again by its own design, without a checkpoint.

An autograd function may save less than its gradient needs and run *another* function's forward
again in its own backward: DeepSeek's attention function runs the norms before it again, which saves
their outputs. No switch was left on, so it is no finding; but it is forward work that runs again.

A function's *own* operators in its backward are its formula (chunked losses, fused activations,
ring exchanges) and are not listed. Nor is a function that is merely part of another one's gradient,
as scattering is of gathering:

* it shows nothing of the forward pass alone: all kernels of its call, or all operators where it
  launches none, are in its own gradient too (a rotation, turned back by the same kernel);
* both call each other.

A function that is a checkpoint by behavior may run its block twice in its node: first without
gradients, to get back from its output the input that it did not keep, as a reversible layer does.
Only the second run, with gradients, is the checkpoint's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.alignment import Alignment
from recompute_scan.recompute.roles import Role, Structure, Work
from recompute_scan.recompute.sequences import Recompute
from recompute_scan.trace.calls import Calls, Kernels, StepSpan, step_of
from recompute_scan.trace.columns import Bool, Int64, Kind, Trace

# Operators that move, make or name memory, and compute nothing.
_NO_WORK = re.compile(
    r"aten::(empty|new_empty|view|_unsafe_view|_?reshape|as_strided|t|transpose|permute|numpy_T|expand"
    r"|slice|select|split|chunk|unbind|squeeze|unsqueeze|narrow|unfold|resize_|record_stream|zeros"
    r"|ones|zero_|fill_|lift_fresh)(_like|_strided|_as|_alias|_with_sizes)?$"
)
# How a function may be called; autograd's own operators have a namespace.
_WRITTEN = re.compile(r"[A-Za-z_]\w{0,119}", re.ASCII)


class DesignedRun(Struct, frozen=True):
    """One function that other functions' gradients run again, over the whole trace.

    Attributes:
        inside: The functions with gradients that run it again, most calls first.
        forward: Calls outside any backward pass.
        again: Calls within the gradients of others.
        time: Device time of their kernels, or their time on the host, ns.
        kernels: How many kernels these launched.
        rows: Rows of these calls; none where they stayed in the alignment.
        graded: Whether a function ran its own block again, with gradients.
    """

    function: str
    inside: tuple[str, ...]
    forward: int
    again: int
    time: int
    kernels: int
    rows: tuple[int, ...]
    graded: bool = False


def find_by_design(
    trace: Trace, structure: Structure, kernels: Kernels, matched: Int64
) -> tuple[DesignedRun, ...]:
    """The functions that run again in other functions' gradients, by time.

    Operators in ``matched`` are recomputes of a checkpoint already.
    """
    calls = structure.calls
    functions = _functions(structure)
    if not functions:
        return ()
    code = {name: at for at, name in enumerate(calls.names)}
    operator = calls.kind == Kind.OP
    launched = np.flatnonzero(kernels.launch >= 0)
    launch, time = kernels.launch[launched], kernels.time[launched]
    named = trace.name[kernels.event[launched]]

    def shows_more(rows: Int64, nodes: Int64) -> bool:
        """Has a function's call work that its own gradient has not? Kernels, or else operators."""
        both = [calls.within(one)[launch] for one in (rows, nodes)]
        if both[0].any():
            return not np.isin(named[both[0]], named[both[1]]).all()
        return not _work(calls, rows) <= _work(calls, nodes)

    outside, inside = _calls_of(structure, functions, matched)
    ran = [np.bincount(launch, weights, len(calls)) for weights in (None, time)]
    found = []
    for name, places in inside.items():
        others = {
            other: rows
            for other, rows in places.items()
            if other in functions
            and other != name
            and name not in inside.get(other, {})
            and structure.evaluations.in_node[rows].all()
        }
        if not others or not len(outside[name]):
            continue
        nodes = np.flatnonzero((calls.name == code[f"{name}Backward"]) & operator)
        if not shows_more(outside[name], nodes):
            continue
        again = np.sort([row for each in others.values() for row in each])
        number, took = (int(calls.sums(each, again).sum()) for each in ran)
        found.append(
            DesignedRun(
                function=name,
                inside=tuple(sorted(others, key=lambda other: (-len(others[other]), other))),
                forward=len(outside[name]),
                again=len(again),
                time=took if len(launch) else int(calls.duration[again].sum()),
                kernels=number,
                rows=tuple(again.tolist()),
            )
        )
    return tuple(sorted(found, key=lambda each: (-each.time, each.function)))


def _calls_of(
    structure: Structure, functions: frozenset[str], matched: Int64
) -> tuple[dict[str, Int64], dict[str, dict[str, list[int]]]]:
    """Calls outside any backward pass, and those inside by the function that made the node."""
    calls, outside = structure.calls, dict[str, Int64]()
    explained = calls.within(matched)
    inside: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    known = {name: code for code, name in enumerate(calls.names) if name in functions}
    for name in functions:
        rows = np.flatnonzero((calls.name == known.get(name, -1)) & (calls.kind == Kind.OP))
        engine = structure.engine[rows]
        outside[name] = rows[engine < 0]
        for row, around in zip(rows.tolist(), engine.tolist(), strict=True):
            if around >= 0 and not explained[row]:
                inside[name][vocabulary.function_of(calls.called(around))].append(row)
    return outside, inside


def without_own_work(work: Work, alignment: Alignment) -> tuple[Alignment, tuple[DesignedRun, ...]]:
    """The alignment without the own work of functions in their nodes, and what functions run again
    by design: that work, and their block in parts with gradients.

    In the forward pass, too, no backward pass goes through their own work: theirs is their block's.
    """
    calls, structure = alignment.structure.calls, alignment.structure
    of_function: dict[tuple[str, bool], list[Recompute]] = defaultdict(list)
    own = set[int]()
    for each in alignment.recomputes:
        role = int(structure.role[each.again[0]])
        if role in (Role.OWN_WORK, Role.BY_DESIGN) and is_of_others(structure, each.engine):
            name = vocabulary.function_of(calls.called(each.engine))
            of_function[name, role == Role.BY_DESIGN].append(each)
            if role == Role.OWN_WORK:
                own.add(id(each))
    found = []
    for (name, graded), runs in of_function.items():
        rows = np.concatenate([each.again for each in runs])
        named = np.array([one == name for one in calls.names], np.bool_)[calls.name]
        found.append(
            DesignedRun(
                function=name,
                inside=(name,),
                forward=int(np.count_nonzero(named & (structure.engine < 0))),
                again=len({each.engine for each in runs}),
                time=int(work.time[rows].sum()),
                kernels=int(work.kernels[rows].sum()),
                rows=() if graded else tuple(rows.tolist()),
                graded=graded,
            )
        )
    rest = tuple(each for each in alignment.recomputes if id(each) not in own)
    alignment = replace(alignment, recomputes=rest)
    backwards = alignment.backwards.copy()
    backwards[alignment.forward.searchsorted(find_own_work(alignment).rows)] = 0
    return replace(alignment, backwards=backwards), tuple(found)


def _functions(structure: Structure) -> frozenset[str]:
    """Names of autograd functions that somebody wrote: their nodes are called after them."""
    names = (structure.calls.names[code] for code in structure.functions.written.tolist())
    left_out = (vocabulary.PLUMBING, vocabulary.NEUTRAL)
    return frozenset(
        name
        for name in names
        if _WRITTEN.fullmatch(name) and not any(one.match(name) for one in left_out)
    )


def _work(calls: Calls, rows: Int64) -> set[str]:
    """Operators that compute something, in these calls."""
    inside = calls.inside(rows) & (calls.kind == Kind.OP)
    names = (calls.names[code] for code in np.unique(calls.name[inside]).tolist())
    idle = (_NO_WORK, vocabulary.NEUTRAL, vocabulary.PLUMBING)
    return {
        name
        for name in names
        if name.startswith("aten::") and not any(one.match(name) for one in idle)
    }


class OwnWork(Struct, frozen=True):
    """Work of checkpoint functions outside their blocks: ascending rows of calls, and for each
    the number of the recompute, or of its piece, that its function makes.
    """

    rows: Int64
    owner: Int64


def find_own_work(alignment: Alignment) -> OwnWork:
    """The own work of all checkpoint functions in the forward pass of a trace, by the position in
    ``Alignment.recomputes`` of its function's recompute.
    """
    calls, structure = alignment.structure.calls, alignment.structure
    blocks: dict[int, tuple[int, int, int]] = {}
    for number, recompute in enumerate(alignment.recomputes):
        if not is_of_others(structure, recompute.engine):
            continue
        begin = first_of_block(structure, recompute.again)
        rows, again = recompute.original[begin:], recompute.again[begin:]
        middle = len(rows) // 2
        # A node runs again what its call holds, further functions' calls among that.
        around = functions_around(structure, int(rows[middle]))
        inside = len(functions_around(structure, int(again[middle])))
        name = vocabulary.function_of(calls.called(recompute.engine))
        if inside < len(around) and calls.called(around[inside]) == name:
            first, last, _ = blocks.get(around[inside], (len(calls), -1, number))
            bounds = min(first, int(rows.min())), max(last, int(rows.max()))
            blocks[around[inside]] = *bounds, number
    owner = np.full(len(calls), -1, np.int64)
    for call, (first, last, number) in blocks.items():
        mine = slice(call + 1, call + 1 + int(calls.size[call]))
        outside = structure.function[mine] == call
        outside[max(0, first - mine.start) : max(0, last + 1 - mine.start)] = False
        owner[mine][outside] = number
    rows = alignment.forward[owner[alignment.forward] >= 0]
    return OwnWork(rows, owner[rows])


def is_of_others(structure: Structure, engine: int) -> bool:
    """Did a checkpoint function, and not torch's, make the node in this engine's range?"""
    if not structure.checkpoint_node[engine]:
        return False
    return vocabulary.function_of(structure.calls.called(engine)) != vocabulary.TORCHS_FUNCTION


def first_of_block(structure: Structure, again: Int64) -> int:
    """Place of the first operator that autograd records, or that is another function's; 0: none.

    A function's node runs its block with gradients on, and brings the input back without.
    """
    inside = (structure.number[again] >= 0) | (structure.function[again] >= 0)
    return int(np.flatnonzero(inside)[0]) if inside.any() else 0


def functions_around(structure: Structure, row: int) -> list[int]:
    """Rows of the calls of checkpoint functions around a call, innermost first.

    In a recompute, those inside the node that runs it.
    """
    around = (one for one in (row, *structure.calls.above(row)) if structure.function[one] == one)
    return [one for one in around if structure.engine[one] == structure.engine[row]]


class Collectives(Struct, frozen=True):
    """Calls of collectives, each counted once, however many ranges it is recorded in.

    Attributes:
        rows: All of them in complete steps, in order of rows.
        repeated: Those inside a recompute.
        gathers: Those with which FSDP gathers parameters.
    """

    rows: Int64
    repeated: Int64
    gathers: Int64

    @property
    def repeated_gathers(self) -> Int64:
        """Gathers of parameters inside a recompute."""
        return self.repeated[np.isin(self.repeated, self.gathers)]


def find_collectives(
    alignment: Alignment, kernels: Kernels, steps: Sequence[StepSpan], complete: Bool
) -> Collectives:
    """The collectives of a trace; see :class:`Collectives`."""
    calls, structure = alignment.structure.calls, alignment.structure
    is_one = calls.where(vocabulary.COLLECTIVE.match)
    is_one &= ~calls.where(vocabulary.NO_COLLECTIVE.match)
    rows = np.flatnonzero(is_one)
    parent = calls.parent[rows]
    rows = rows[(parent < 0) | ~is_one[np.maximum(parent, 0)]]
    counted = np.append(complete, False)[step_of(steps, calls.start[rows])]
    rows = rows[counted & ~_only_waits(calls, kernels, rows)]
    gather = calls.where(vocabulary.GATHER.match)
    recomputes = alignment.recomputes if len(rows) else ()
    inside = [_inside(structure, recompute, rows) for recompute in recomputes]
    return Collectives(
        rows=rows,
        repeated=np.unique(np.concatenate([rows[:0], *inside])),
        gathers=rows[gather[rows] & calls.inside(calls.named(vocabulary.SHARDING))[rows]],
    )


def kernels_of(calls: Calls, kernels: Kernels, rows: Int64) -> Bool:
    """For each piece of device work: was it launched inside one of these calls?"""
    return np.append(calls.within(rows), False)[kernels.launch]


def _only_waits(calls: Calls, kernels: Kernels, rows: Int64) -> Bool:
    """For each call: is it NCCL's record of a wait for a collective that was counted already?

    It has the name of the record of the collective itself, which is inside the call of c10d
    or, where a library asks NCCL without c10d, holds NCCL's own range and its launches.
    """
    bare = calls.where(vocabulary.RECORD.match)[rows]
    if not bare.any():
        return bare
    work = calls.where(vocabulary.BACKEND.match)
    work[kernels.launch[kernels.launch >= 0]] = True
    return np.asarray(bare & (calls.sums(work, rows) == 0))


def _inside(structure: Structure, recompute: Recompute, rows: Int64) -> Int64:
    """Those of ``rows`` that this recompute does, gathers before its first operator included."""
    calls = structure.calls
    table = structure.evaluations
    mine: Int64 = rows[structure.engine[rows] == recompute.engine]
    if table.node[table.row.searchsorted(recompute.engine)] >= 0:
        mine = mine[table.in_node[mine]]  # hooks run outside it
    if structure.checkpoint_node[recompute.engine]:
        return mine  # all that the node runs itself is the recompute
    # Later operators belong to the formula of the node that asked.
    return np.asarray(mine[calls.start[mine] <= calls.end[recompute.again].max()])
