"""Operators by family: how often each ran in the forward pass, again, and backward."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from msgspec import Struct

from recompute_scan.model import step_of
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.attention.kernel_evidence import KernelEvidence
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.recompute.roles import Role
from recompute_scan.result import Attention, Family
from recompute_scan.trace.columns import Int64


class _Tally(Struct):
    forward: int = 0
    again: float = 0.0
    backward: int = 0
    time_ms: float = 0.0


def count_families(facts: RecomputeFacts, scale: float = 1.0) -> tuple[Family, ...]:
    """Families of the forward operators that have a backward, per complete step.

    Those whose recomputes take longest come first. ``backward_per_step`` counts autograd nodes.

    Args:
        facts: What ran again.
        scale: Factor from recorded to unprofiled times.
    """
    steps = max(1, facts.complete_count)
    tallies: dict[tuple[str, str], _Tally] = defaultdict(_Tally)
    counts = facts.counts
    if counts.operators is None:
        known, kinds = _families_of_rows(facts, counts.rows[counts.counted])
    else:
        known, kinds = _families_of_names(np.array(counts.operators)[counts.counted].tolist())
    columns = (
        np.bincount(kinds),
        np.bincount(kinds, counts.runs[counts.counted]),
        np.bincount(kinds, counts.again[counts.counted] / 1e6),
    )
    for family, forward, again, time_ms in zip(
        known, *map(np.ndarray.tolist, columns), strict=True
    ):
        tallies[family] = _Tally(forward=forward, again=again, time_ms=time_ms)
    for family, number in _backward_nodes(facts).items():
        if family in tallies:
            tallies[family].backward = number
    families = [
        Family(
            family=name,
            kind=kind,
            forward_per_step=tally.forward / steps,
            recomputed_per_step=tally.again / steps,
            backward_per_step=tally.backward / steps,
            recompute_ms_per_step=tally.time_ms * scale / steps,
        )
        for (name, kind), tally in tallies.items()
    ]
    return tuple(sorted(families, key=lambda f: (-f.recompute_ms_per_step, f.family)))


def attention_of(families: tuple[Family, ...]) -> Attention | None:
    """All attention families together, ``None`` where there are none."""
    mine = [family for family in families if family.kind == "attention"]
    if not mine:
        return None
    return Attention(
        forward_per_step=sum(family.forward_per_step for family in mine),
        recomputed_per_step=sum(family.recomputed_per_step for family in mine),
        backward_per_step=sum(family.backward_per_step for family in mine),
    )


def count_kernels(evidence: KernelEvidence) -> tuple[Family, ...]:
    """Families by their main kernels, per step that holds a backward of them.

    Their times are those of the main kernels alone.
    """
    steps = max(1, len(evidence.steps))
    return tuple(
        Family(
            family=family.name,
            kind="attention",
            forward_per_step=family.forward / steps,
            recomputed_per_step=family.again / steps,
            backward_per_step=family.backward / steps,
            recompute_ms_per_step=family.again_ns / 1e6 / steps,
        )
        for family in evidence.families
    )


def _families_of_rows(facts: RecomputeFacts, rows: Int64) -> tuple[list[tuple[str, str]], Int64]:
    """Families in order of appearance, and the position there of each operator's.

    Attention's is that of the kernel-level operator inside the wrapper.
    """
    calls = facts.calls
    by_name = [words.family_of(name) for name in calls.names]
    found = [by_name[code] for code in calls.name[rows].tolist()]
    attention = np.array([kind == "attention" for _, kind in by_name], np.bool_)
    for place in np.flatnonzero(attention[calls.name[rows]]).tolist():
        inside = slice(int(rows[place]), int(rows[place]) + 1 + int(calls.size[rows[place]]))
        exact = {by_name[code] for code in calls.name[inside].tolist()}
        exact.discard(("attention", "attention"))
        found[place] = min((f for f in exact if f[1] == "attention"), default=found[place])
    known = dict(zip(dict.fromkeys(found), range(len(found)), strict=False))
    return list(known), np.array([known[family] for family in found], np.int64)


def _families_of_names(names: list[str]) -> tuple[list[tuple[str, str]], Int64]:
    """The same by the operators' names alone."""
    found = [words.family_of(name) for name in names]
    known = dict(zip(dict.fromkeys(found), range(len(found)), strict=False))
    return list(known), np.array([known[family] for family in found], np.int64)


def _backward_nodes(facts: RecomputeFacts) -> dict[tuple[str, str], int]:
    calls, structure = facts.calls, facts.structure
    engines = structure.rows(Role.BACKWARD)
    step = step_of(list(facts.steps), calls.start[engines])
    engines = engines[(step >= 0) & facts.complete[np.maximum(step, 0)]]
    numbers: dict[tuple[str, str], int] = defaultdict(int)
    for code, times in zip(*np.unique(calls.name[engines], return_counts=True), strict=True):
        numbers[family_of_node(calls.names[code])] += int(times)
    return numbers


def family_of_node(name: str) -> tuple[str, str]:
    """Family of a node by its operator's name: ``ScaledDotProduct…Backward0`` is attention's."""
    node = name.removeprefix(words.ENGINE).rstrip("0123456789").removesuffix("Backward")
    spelled = "".join("_" + c.lower() if c.isupper() else c for c in node).lstrip("_")
    family = words.family_of(f"aten::{spelled}")
    return family if family != words.OTHER_FAMILY else words.family_of(node)
