"""What every removal from the steps of a trace asks of that trace, found once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recompute_scan.annotations import MARKING
from recompute_scan.cost.edits import Edit
from recompute_scan.cost.entries import Entries, typical_gap
from recompute_scan.cost.hooks import saved_tensors
from recompute_scan.cost.moments import Moments
from recompute_scan.cost.runs import Stretch, find_stretches
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.facts import Recompute
from recompute_scan.recompute.structure import Role, root_engines
from recompute_scan.trace.columns import Bool, Int32


@dataclass(frozen=True)
class Surroundings:
    """What surrounds the operators that ran again.

    Attributes:
        facts: What ran again.
        stretches: All replays, in pieces of a kind.
        here: For each call: does it touch the steps that matter?
        replayed: For each call: is it an operator that ran again?
        saved: For each operator, how many tensors autograd saves.
        checkpoint_node: For each call: is it the node of a reentrant checkpoint?
        marking: For each call: is it the run wrapper's own?
        behind: What the time between operators can begin behind.
        before: What it can end before.
        entries: What checkpoints do before and behind operators.
        gap: The usual time between two nodes of the backward pass, ns.
    """

    facts: Recompute
    stretches: Sequence[Stretch]
    here: Bool
    replayed: Bool
    saved: Int32
    checkpoint_node: Bool
    marking: Bool
    behind: Moments
    before: Moments
    entries: Entries
    gap: float


def surroundings(facts: Recompute, begin: int, end: int) -> Surroundings:
    """What removals from the steps between these two times, in ns, ask of the trace."""
    calls, role = facts.calls, facts.structure.role
    here = (calls.start < end) & (calls.end > begin)
    replayed = np.zeros(len(calls), np.bool_)
    for replay in facts.alignment.replays:
        replayed[replay.again] = True
    above = np.maximum(calls.parent, 0)
    node = (role == Role.FORMULA) & (role[above] == Role.BACKWARD) & (calls.parent >= 0)
    nodes = words.nodes_of(facts.structure.functions.names)
    checkpoint_node = _named(facts, nodes)
    marking = _named(facts, frozenset({MARKING}))
    work = replayed | np.isin(role, (Role.FORWARD, Role.FORMULA, Role.OPTIMIZER, Role.BACKWARD))
    ranges = (role == Role.RANGE) & ~marking & ~checkpoint_node
    done = here & (work | ranges | (role == Role.PLUMBING))
    operators = here & (replayed | (role == Role.FORWARD))
    return Surroundings(
        facts=facts,
        stretches=find_stretches(facts),
        here=here,
        replayed=replayed,
        saved=saved_tensors(calls),
        checkpoint_node=checkpoint_node,
        marking=marking,
        behind=Moments(
            calls.thread,
            (
                (here & (work | ranges), calls.end),
                (here & (node | checkpoint_node), calls.start),
            ),
        ),
        before=Moments(calls.thread, ((here & work, calls.start),)),
        entries=Entries(facts, done, operators),
        gap=typical_gap(facts, root_engines(calls, facts.structure)),
    )


def markings(facts: Recompute) -> list[Edit]:
    """The time that the run wrapper itself took to name checkpoints: never part of a step."""
    calls = facts.calls
    rows = np.flatnonzero(_named(facts, frozenset({MARKING})))
    return [
        Edit(int(calls.thread[row]), int(calls.start[row]), int(calls.end[row]), gone=True)
        for row in rows
    ]


def _named(facts: Recompute, names: frozenset[str]) -> Bool:
    known = np.array([name in names for name in facts.calls.names], np.bool_)
    return known[facts.calls.name]
