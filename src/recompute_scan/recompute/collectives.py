"""Communication that a recompute does again: parameters gathered once more, activations reduced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.alignment import Alignment
from recompute_scan.recompute.roles import Structure
from recompute_scan.recompute.sequences import Recompute
from recompute_scan.trace.calls import Calls, Kernels, StepSpan, step_of
from recompute_scan.trace.columns import Bool, Int64


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
    calls: Calls,
    structure: Structure,
    kernels: Kernels,
    alignment: Alignment,
    steps: Sequence[StepSpan],
    complete: Bool,
) -> Collectives:
    """The collectives of a trace; see :class:`Collectives`.

    Args:
        calls: The trace's calls.
        structure: Their roles.
        kernels: Device work with its launches.
        alignment: The recomputes.
        steps: Steps, in order.
        complete: For each step: does it count?
    """
    is_one = calls.matching(vocabulary.COLLECTIVE) & ~calls.matching(vocabulary.NO_COLLECTIVE)
    rows = np.flatnonzero(is_one[calls.name])
    parent = calls.parent[rows]
    rows = rows[(parent < 0) | ~is_one[calls.name[np.maximum(parent, 0)]]]
    step = step_of(list(steps), calls.start[rows])
    counted = (step >= 0) & np.append(complete, False)[step]
    rows = rows[counted & ~_only_waits(calls, kernels, rows)]
    recomputes = alignment.recomputes if len(rows) else ()
    inside = [_inside(calls, structure, recompute, rows) for recompute in recomputes]
    return Collectives(
        rows=rows,
        repeated=np.unique(np.concatenate([rows[:0], *inside])),
        gathers=rows[_gathers_parameters(calls, rows)],
    )


def time_of(calls: Calls, kernels: Kernels, rows: Int64) -> float:
    """Time of these calls in ns: of the kernels they launched, or on the host without any."""
    held = kernels_of(calls, kernels, rows)
    if held.any():
        return float((kernels.end - kernels.start)[held].sum())
    return float(calls.duration[rows].sum())


def kernels_of(calls: Calls, kernels: Kernels, rows: Int64) -> Bool:
    """For each piece of device work: was it launched inside one of these calls?

    Args:
        calls: The trace's calls.
        kernels: Its device work.
        rows: Calls none of which is in another, ascending.
    """
    launch = kernels.launch
    at = rows.searchsorted(launch, side="right") - 1
    held: Bool = (at >= 0) & (launch >= 0)
    if len(rows):
        held &= launch <= (rows + calls.size[rows])[np.maximum(at, 0)]
    return held


def _only_waits(calls: Calls, kernels: Kernels, rows: Int64) -> Bool:
    """For each call: is it NCCL's record of a wait for a collective that was counted already?

    It has the name of the record of the collective itself, which is inside the call of c10d
    or, where a library asks NCCL without c10d, holds NCCL's own range and its launches.
    """
    bare = calls.matching(vocabulary.RECORD)[calls.name[rows]]
    if not bare.any():
        return bare
    ranges = np.flatnonzero(calls.matching(vocabulary.BACKEND)[calls.name])
    launches = np.unique(kernels.launch)
    last = rows + calls.size[rows]
    for work in (ranges, launches):
        bare &= work.searchsorted(rows) == work.searchsorted(last, side="right")
    return bare


def _gathers_parameters(calls: Calls, rows: Int64) -> Bool:
    """For each collective: is it a gather that FSDP started?"""
    gather, sharding = calls.matching(vocabulary.GATHER), calls.matching(vocabulary.SHARDING)
    found: Bool = np.zeros(len(rows), np.bool_)
    for place in np.flatnonzero(gather[calls.name[rows]]):
        above = int(calls.parent[rows[place]])
        while above >= 0 and not sharding[calls.name[above]]:
            above = int(calls.parent[above])
        found[place] = above >= 0
    return found


def _inside(calls: Calls, structure: Structure, recompute: Recompute, rows: Int64) -> Int64:
    """Those of ``rows`` that this recompute does, gathers before its first operator included."""
    mine: Int64
    node = _node(calls, recompute.engine)
    mine = rows[(rows > node) & (rows <= node + calls.size[node])]
    mine = mine[structure.engine[mine] == recompute.engine]
    if structure.checkpoint_node[recompute.engine]:
        return mine  # all that the node runs itself is the recompute
    # What comes later belongs to the formula of the node that asked.
    mine = mine[calls.start[mine] <= calls.end[recompute.again].max()]
    return mine


def _node(calls: Calls, engine: int) -> int:
    """Row of the node inside an engine's range; hooks run beside it. Itself in old traces."""
    name = calls.names[calls.name[engine]]
    if not name.startswith(vocabulary.ENGINE):
        return engine
    wanted = name[len(vocabulary.ENGINE) :]
    for row in range(engine + 1, engine + 1 + int(calls.size[engine])):
        if calls.parent[row] == engine and calls.names[calls.name[row]] == wanted:
            return row
    return engine
