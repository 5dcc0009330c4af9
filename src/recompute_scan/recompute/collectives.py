"""Communication that a replay does again: parameters gathered once more, activations reduced."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recompute_scan.model import Calls
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.facts import Recompute
from recompute_scan.recompute.matching import Replay
from recompute_scan.trace.columns import Int64


@dataclass(frozen=True)
class Collectives:
    """Calls of collectives, each counted once, however many ranges it is recorded in.

    Attributes:
        rows: All of them, in order of rows.
        repeated: Those inside a replay.
    """

    rows: Int64
    repeated: Int64


def find_collectives(facts: Recompute) -> Collectives:
    """The collectives of a trace; see :class:`Collectives`."""
    calls = facts.calls
    is_one = calls.matching(words.COLLECTIVE) & ~calls.matching(words.NO_COLLECTIVE)
    rows = np.flatnonzero(is_one[calls.name])
    parent = calls.parent[rows]
    rows = rows[(parent < 0) | ~is_one[calls.name[np.maximum(parent, 0)]]]
    inside = [_inside(facts, replay, rows) for replay in facts.alignment.replays]
    return Collectives(rows, np.unique(np.concatenate([rows[:0], *inside])))


def time_of(facts: Recompute, rows: Int64) -> float:
    """Time of these calls in ns: of the kernels they launched, or on the host without any."""
    calls, kernels = facts.calls, facts.kernels
    launch = kernels.launch
    first, last = rows, rows + calls.size[rows]
    at = np.searchsorted(first, launch, side="right") - 1
    held = (at >= 0) & (launch >= 0)
    if len(rows):
        held &= launch <= last[np.maximum(at, 0)]
    if held.any():
        return float((kernels.end - kernels.start)[held].sum())
    return float(calls.duration[rows].sum())


def _inside(facts: Recompute, replay: Replay, rows: Int64) -> Int64:
    """Those of ``rows`` that this replay does, gathers before its first operator included."""
    calls, structure = facts.calls, facts.structure
    mine: Int64
    node = _node(calls, replay.engine)
    mine = rows[(rows > node) & (rows <= node + calls.size[node])]
    mine = mine[structure.engine[mine] == replay.engine]
    if structure.checkpoint_node[replay.engine]:
        return mine  # all that the node runs itself is the replay
    # What comes later belongs to the formula of the node that asked.
    mine = mine[calls.start[mine] <= calls.end[replay.again].max()]
    return mine


def _node(calls: Calls, engine: int) -> int:
    """Row of the node inside an engine's range; hooks run beside it. Itself in old traces."""
    name = calls.names[calls.name[engine]]
    if not name.startswith(words.ENGINE):
        return engine
    wanted = name[len(words.ENGINE) :]
    for row in range(engine + 1, engine + 1 + int(calls.size[engine])):
        if calls.parent[row] == engine and calls.names[calls.name[row]] == wanted:
            return row
    return engine
