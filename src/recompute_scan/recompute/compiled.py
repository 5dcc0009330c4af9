"""The part of the backward pass that is compiled: what runs in it, operators show only in part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recompute_scan.model import Calls
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.structure import Role, Structure, root_engines


@dataclass(frozen=True)
class Compiled:
    """The compiled nodes of a backward pass.

    Attributes:
        nodes: How many ran.
        share: Their share of the host time of the backward pass, 0..1, without replays in them.
        recomputes: Whether operators stand in them that no gradient's formula has: attention's
            forward, a convolution, ``linear``. (``addmm`` proves nothing: Inductor makes it of a
            product and a sum, ``torch/_inductor/fx_passes/post_grad.py``.)
    """

    nodes: int
    share: float
    recomputes: bool


def compiled_backward(calls: Calls, structure: Structure) -> Compiled | None:
    """The compiled part of the backward pass; ``None`` where nothing of it is compiled."""
    named = calls.matching(words.COMPILED_NODE)
    engines = structure.rows(Role.BACKWARD)
    mine = engines[named[calls.name[engines]]]
    if not len(mine):
        return None
    # A node can hold the replay that it asked for: that is not compiled into it.
    asked = np.isin(structure.engine, mine) & (structure.role == Role.CANDIDATE)
    time = int(calls.duration[mine].sum()) - int(calls.duration[asked].sum())
    whole = int(calls.duration[root_engines(calls, structure)].sum())
    forward = np.array(
        [words.only_forward(name) and name != "aten::addmm" for name in calls.names], np.bool_
    )
    rows = np.flatnonzero(forward[calls.name] & (structure.top >= 0) & (structure.engine >= 0))
    rows = rows[structure.role[structure.top[rows]] == Role.FORMULA]
    return Compiled(
        nodes=len(mine),
        share=min(1.0, max(0, time) / max(1, whole)),
        recomputes=bool(named[calls.name[structure.engine[rows]]].any()),
    )
