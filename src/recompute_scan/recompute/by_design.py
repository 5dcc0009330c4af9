"""Forward work that a model runs again by its own design, without a checkpoint.

An autograd function may save less than its gradient needs and run *another* function's forward
again in its own backward: DeepSeek's attention function runs the norms before it again, which saves
their outputs. Nobody left a switch on, so it is no finding; but it is forward work that runs again.

What a function runs of *itself* in its own backward is its formula (chunked losses, fused
activations, ring exchanges), and is not listed. Nor is a function that merely is part of another
one's gradient, as scattering is of gathering:

* it shows nothing of the forward pass alone: all kernels of its call, or all operators where it
  launches none, are in its own gradient too (a rotation, turned back by the same kernel);
* the gradient that calls it does nothing else, so that it is that gradient;
* both call each other.

A function that is a checkpoint of its own kind may run its block twice in its node: once without
gradients, and again with them for the gradient. A reversible layer does, to get back the input
that it did not keep from its output. Only the second run is the checkpoint's; the first is what
makes the layer reversible, and no switch can take it out.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.alignment import Alignment, is_of_others
from recompute_scan.recompute.roles import Role, Structure
from recompute_scan.recompute.sequences import Recompute
from recompute_scan.recompute.verdict import Judgement
from recompute_scan.recompute.work import Work
from recompute_scan.trace.calls import Calls, Kernels
from recompute_scan.trace.columns import Int64, Kind, Trace

# What moves, makes or names memory, and computes nothing.
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
        function: Its name.
        inside: The functions in whose gradients it runs again, those that do so most first.
        forward: Calls outside any backward pass.
        again: Calls within the gradients of others.
        time: Device time of what these launched, or their own on the host, ns.
        kernels: How many kernels these launched.
        rows: Rows of these calls.
    """

    function: str
    inside: tuple[str, ...]
    forward: int
    again: int
    time: int
    kernels: int
    rows: tuple[int, ...]


def find_by_design(
    trace: Trace, calls: Calls, structure: Structure, kernels: Kernels, matched: Int64
) -> tuple[DesignedRun, ...]:
    """The functions that run again in other functions' gradients, by time.

    Args:
        trace: The trace.
        calls: Its calls.
        structure: Their roles.
        kernels: Device work with its launches.
        matched: Rows of operators that are recomputes of a checkpoint already.
    """
    functions = _functions(calls, structure)
    if not functions:
        return ()
    code = {name: at for at, name in enumerate(calls.names)}
    explained = calls.within(matched)
    operator = calls.kind == Kind.OP
    launched = _Launched(trace, calls, kernels)
    # Rows of calls outside any backward pass, and, by the function whose node it is, inside.
    outside: dict[str, Int64] = {}
    inside: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for name in functions:
        rows = np.flatnonzero((calls.name == code[name]) & operator)
        engine = structure.engine[rows]
        outside[name] = rows[engine < 0]
        for row, around in zip(rows.tolist(), engine.tolist(), strict=True):
            if around >= 0 and not explained[row]:
                inside[name][_function_of(calls, around)].append(row)
    found = []
    for name, places in inside.items():
        others = {
            other: rows
            for other, rows in places.items()
            if other in functions
            and other != name
            and name not in inside.get(other, {})
            and _in_node(calls, rows, other)
            and not _is_the_gradient(calls, structure, launched, rows)
        }
        if not others or not len(outside[name]):
            continue
        if not _forward_alone(calls, structure, launched, outside[name], code, name):
            continue
        again = sorted(row for each in others.values() for row in each)
        number, time = launched.of(again)
        if not launched.any:
            time = int(calls.duration[again].sum())
        found.append(
            DesignedRun(
                function=name,
                inside=tuple(sorted(others, key=lambda other: (-len(others[other]), other))),
                forward=len(outside[name]),
                again=len(again),
                time=time,
                kernels=number,
                rows=tuple(again),
            )
        )
    return tuple(sorted(found, key=lambda each: (-each.time, each.function)))


def part_own_runs(
    calls: Calls, structure: Structure, work: Work, alignment: Alignment
) -> tuple[Alignment, tuple[DesignedRun, ...]]:
    """The alignment without what functions run of their own blocks beside the recompute, and that.

    Args:
        calls: The trace's calls.
        structure: Their roles.
        work: Their work on the device.
        alignment: All recomputes.
    """
    own = [
        each
        for each in alignment.recomputes
        if structure.role[each.again[0]] == Role.OWN_WORK
        and is_of_others(calls, structure, each.engine)
    ]
    if not own:
        return alignment, ()
    mine = set(map(id, own))
    rest = tuple(each for each in alignment.recomputes if id(each) not in mine)
    of_function: dict[str, list[Recompute]] = defaultdict(list)
    for each in own:
        of_function[_function_of(calls, each.engine)].append(each)
    found = []
    for name, runs in of_function.items():
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
                rows=tuple(rows.tolist()),
            )
        )
    return replace(alignment, recomputes=rest), tuple(found)


def rows_of(found: Sequence[DesignedRun]) -> Int64:
    """Rows of all their calls."""
    return np.array([row for each in found for row in each.rows], np.int64)


def left_unexplained(unexplained: Int64, found: Sequence[DesignedRun]) -> Int64:
    """The operators that no recompute explains, without those that run again by design."""
    return unexplained[~np.isin(unexplained, rows_of(found))]


def with_design(
    judgement: Judgement, found: Sequence[DesignedRun], forward_time: float
) -> Judgement:
    """The verdict with these: no checkpoint, and yet forward work that runs again, once.

    Args:
        judgement: The verdict without them.
        found: What runs again by design.
        forward_time: Time of all forward operators, in the unit of ``ByDesign.time``.
    """
    if judgement.verdict != "none" or not found:
        return judgement
    highest = max(max(1, math.ceil(each.again / each.forward)) for each in found)
    again = sum(each.time for each in found)
    share = min(1.0, again / forward_time) if forward_time > 0 else None
    return Judgement("partial", None, float(highest), share, share)


class _Launched:
    """The kernels that calls launched."""

    def __init__(self, trace: Trace, calls: Calls, kernels: Kernels) -> None:
        known = np.flatnonzero(kernels.launch >= 0)
        order = known[kernels.launch[known].argsort(kind="stable")]
        self._calls = calls
        self._launch = kernels.launch[order]
        self._name = trace.name[kernels.event[order]]
        self._time = (kernels.end - kernels.start)[order]
        self.any = bool(len(order))

    def _span(self, row: int) -> slice:
        first, last = self._launch.searchsorted([row, row + 1 + int(self._calls.size[row])])
        return slice(int(first), int(last))

    def of(self, rows: Sequence[int]) -> tuple[int, int]:
        """How many kernels these calls launched, and their time in ns."""
        spans = [self._span(row) for row in rows]
        return sum(s.stop - s.start for s in spans), sum(int(self._time[s].sum()) for s in spans)

    def names(self, rows: Sequence[int]) -> Counter[int]:
        """The names of the kernels that these calls launched."""
        return Counter(name for row in rows for name in self._name[self._span(row)].tolist())


def _functions(calls: Calls, structure: Structure) -> frozenset[str]:
    """Names of autograd functions that somebody wrote: their nodes are called after them."""
    names = (calls.names[code] for code in structure.functions.called.values())
    return frozenset(
        name
        for name in names
        if _WRITTEN.fullmatch(name)
        and not vocabulary.PLUMBING.match(name)
        and not vocabulary.NEUTRAL.match(name)
    )


def _function_of(calls: Calls, engine: int) -> str:
    node: str = calls.names[calls.name[engine]]
    return node.removeprefix(vocabulary.ENGINE).removesuffix("Backward")


def _in_node(calls: Calls, rows: Sequence[int], other: str) -> bool:
    """Do they run in the other function's node itself, and not in a hook around it?"""
    for row in rows:
        above = int(calls.parent[row])
        while above >= 0 and calls.names[calls.name[above]] != f"{other}Backward":
            above = int(calls.parent[above])
        if above < 0:
            return False
    return True


def _node_of(calls: Calls, row: int, engine: int) -> int:
    node = row
    while int(calls.parent[node]) > engine:
        node = int(calls.parent[node])
    return node


def _is_the_gradient(
    calls: Calls, structure: Structure, launched: _Launched, rows: Sequence[int]
) -> bool:
    """Does the node that holds these calls do nothing else?"""
    nodes = {_node_of(calls, row, int(structure.engine[row])) for row in rows}
    if launched.any:
        return launched.of(sorted(nodes))[0] <= launched.of(rows)[0]
    own = _work(calls, sorted(nodes)) - _work(calls, rows)
    return not own


def _work(calls: Calls, rows: Sequence[int]) -> Counter[str]:
    """Operators that compute something, in these calls."""
    found: Counter[str] = Counter()
    for row in rows:
        inside = slice(row + 1, row + 1 + int(calls.size[row]))
        kinds = calls.kind[inside] == Kind.OP
        found.update(calls.names[code] for code in calls.name[inside][kinds].tolist())
    for name in list(found):
        idle = (
            _NO_WORK.match(name)
            or vocabulary.NEUTRAL.match(name)
            or vocabulary.PLUMBING.match(name)
        )
        if idle or not name.startswith("aten::"):
            del found[name]
    return found


def _forward_alone(
    calls: Calls,
    structure: Structure,
    launched: _Launched,
    outside: Int64,
    code: dict[str, int],
    name: str,
) -> bool:
    """Has the function's call work that its own gradient has not?"""
    nodes = np.flatnonzero((calls.name == code[f"{name}Backward"]) & (calls.kind == Kind.OP))
    some = outside.tolist()
    if launched.any and launched.of(some)[0]:
        return bool(set(launched.names(some)) - set(launched.names(nodes.tolist())))
    return bool(set(_work(calls, some)) - set(_work(calls, nodes.tolist())))
