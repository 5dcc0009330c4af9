"""Regions and families: the rows of the report.

Operators by family: how often each ran in the forward pass, again, and backward.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.alignment import Counts
from recompute_scan.recompute.layers import Block, numbered
from recompute_scan.recompute.roles import Role, Structure
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.result import Attention, Checkpoint, Family, Proof, ProofLane, ProofOp, Region
from recompute_scan.trace.columns import NS_PER_MS, Bool, Int64


def count_families(facts: RecomputeFacts, scale: float = 1.0) -> tuple[Family, ...]:
    """Families of the forward operators that have a backward, per complete step.

    The longest recomputes come first. ``backward_per_step`` counts autograd nodes. ``scale`` is the
    factor from recorded to unprofiled times.
    """
    steps = max(1, facts.complete_count)
    counts, mine = facts.counts, facts.counts.counted
    if counts.operators is None:
        found = _families_of(facts, counts.rows[mine])
    else:
        found = [vocabulary.family_of(name) for name in np.array(counts.operators)[mine].tolist()]
    known = {family: place for place, family in enumerate(dict.fromkeys(found))}
    kinds = np.array([known[family] for family in found], np.int64)
    columns = (
        np.bincount(kinds),
        np.bincount(kinds, counts.runs[mine]),
        np.bincount(kinds, counts.recompute_ns[mine] / NS_PER_MS),
    )
    engines = facts.structure.rows(Role.BACKWARD)
    names = map(facts.calls.called, engines[facts.in_whole_step(engines)].tolist())
    nodes = Counter[tuple[str, str]]()
    for name, times in Counter(names).items():
        nodes[family_of_node(name)] += times
    families = [
        Family(
            family=name,
            kind=kind,
            forward_per_step=forward / steps,
            recomputed_per_step=again / steps,
            backward_per_step=nodes[name, kind] / steps,
            recompute_ms_per_step=time_ms * scale / steps,
        )
        for (name, kind), forward, again, time_ms in zip(
            known, *map(np.ndarray.tolist, columns), strict=True
        )
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


def _families_of(facts: RecomputeFacts, rows: Int64) -> list[tuple[str, str]]:
    """The family of each operator; attention has the kernel-level operator's in the wrapper."""
    calls = facts.calls
    by_name = [vocabulary.family_of(name) for name in calls.names]
    found = [by_name[code] for code in calls.name[rows].tolist()]
    for place, (row, (_, kind)) in enumerate(zip(rows.tolist(), found, strict=True)):
        if kind == "attention":
            inside = calls.name[row : row + 1 + int(calls.size[row])].tolist()
            exact = {by_name[code] for code in inside} - {("attention", "attention")}
            found[place] = min((f for f in exact if f[1] == kind), default=found[place])
    return found


def family_of_node(name: str) -> tuple[str, str]:
    """Family of a node by its operator's name: ``ScaledDotProduct…Backward0`` is attention's."""
    node = name.removeprefix(vocabulary.ENGINE).rstrip("0123456789").removesuffix("Backward")
    spelled = "".join("_" + c.lower() if c.isupper() else c for c in node).lstrip("_")
    family = vocabulary.family_of(f"aten::{spelled}")
    return family if family != vocabulary.OTHER_FAMILY else vocabulary.family_of(node)


_MOST_OPERATORS = 400
# Forward passes of one layer, from the last, among which the shown one is chosen.
_MOST_COMPARED = 16
_SHOWN_OPERATORS = 4


def list_regions(facts: RecomputeFacts, scale: float = 1.0) -> tuple[Region, ...]:
    """One row per layer, averaged over the complete steps, in forward order; see
    :func:`count_families`.
    """
    steps = max(1, facts.complete_count)
    per_step_ms = scale / NS_PER_MS / steps
    counts = facts.counts
    regions = []
    for ordinal, blocks in enumerate(facts.layers):
        places = [block.places for block in blocks]
        recomputes = [counts.highest(part) for part in places]
        everywhere = np.concatenate([np.arange(p.start, p.stop) for p in places])
        first = blocks[0]
        regions.append(
            Region(
                ordinal=ordinal,
                module=first.span.module,
                module_class=first.span.module_class,
                signature=_signature(facts, first),
                forward_runs_per_step=len(blocks) / steps,
                recompute_runs_per_backward=float(np.mean(recomputes)),
                mean_recompute=counts.mean(everywhere),
                forward_ms_per_step=float(counts.weight[everywhere].sum()) * per_step_ms,
                recompute_ms_per_step=float(counts.recompute_ns[everywhere].sum()) * per_step_ms,
                redundant_ms_per_step=float(counts.redundant_ns[everywhere].sum()) * per_step_ms,
                checkpoints=_checkpoints(counts, blocks, max(recomputes)),
                recomputes_by_step=_by_step(facts, places, recomputes),
                backward_passes=max(counts.passes(part) for part in places),
            )
        )
    return tuple(regions)


def _by_step(
    facts: RecomputeFacts, places: list[slice], recomputes: list[float]
) -> tuple[float | None, ...]:
    found: list[list[float]] = [[] for _ in facts.steps]
    for place, number in zip(places, recomputes, strict=True):
        # operators in no step have -1; a block has some in a complete one
        found[int(facts.counts.step[place].max())].append(number)
    return tuple(float(np.mean(numbers)) if numbers else None for numbers in found)


def _checkpoints(counts: Counts, blocks: list[Block], runs: float) -> tuple[Checkpoint, ...]:
    """Those around the blocks, and where these do not explain the runs again, those around parts
    that do.
    """
    around = Counter(block.checkpoints for block in blocks).most_common(1)[0][0]
    if runs <= len(around):
        return around
    told = {
        (one.mechanism, one.call_site, one.variant, one.function): one
        for block in blocks
        for part in block.parts
        if counts.highest(part.places) > len(around)
        for one in part.checkpoints
        if one.around == "part"
    }
    return numbered((*around, *told.values()))


def _signature(facts: RecomputeFacts, block: Block) -> str:
    names = [name.removeprefix("aten::") for name in facts.counts.names(facts.calls, block.places)]
    shown = list(dict.fromkeys(names))
    more = ", …" if len(shown) > _SHOWN_OPERATORS else ""
    return f"{len(names)} operators: {', '.join(shown[:_SHOWN_OPERATORS])}{more}"


def show_proof(facts: RecomputeFacts, regions: tuple[Region, ...]) -> Proof | None:
    """The block that shows the verdict best: of the most recomputed layers the middle one, in the
    forward pass where its runs were shortest: other work on a machine only lengthens them.

    ``None`` when nothing was recomputed or the trace has no blocks.
    """
    if not regions:
        return None
    most = max(region.recompute_runs_per_backward for region in regions)
    shown = [region for region in regions if region.recompute_runs_per_backward == most]
    region = shown[len(shown) // 2]
    block, rows, runs = _quietest(facts, facts.layers[region.ordinal][-_MOST_COMPARED:])
    lanes = [_lane(facts, "forward", "forward", rows)]
    for number, again in enumerate(runs, 1):
        label = "recompute" if len(runs) == 1 else f"recompute {number}"
        lanes.append(_lane(facts, label, "recompute" if number == 1 else "redundant", again))
    backward = _backward(facts, rows, runs)
    if len(backward):
        lanes.append(_lane(facts, "backward", "backward", backward))
    step = int(facts.counts.step[block.span.first])
    return Proof(region=region.ordinal, step=facts.steps[step].index, lanes=tuple(lanes))


def _quietest(facts: RecomputeFacts, blocks: list[Block]) -> tuple[Block, Int64, list[Int64]]:
    """Of one layer's blocks with the most runs, the one with the shortest runs together, and the
    rows of its forward and of each recompute; of equals the last.
    """
    found = []
    for block in reversed(blocks):
        rows = np.unique(facts.counts.rows[block.places])
        runs = _recomputes(facts, rows)
        spans = (_spans(facts, run) for run in (rows, *runs))
        took = sum(int(ends.max() - starts.min()) for starts, ends in spans)
        found.append((-len(runs), took, (block, rows, runs)))
    return min(found, key=lambda one: one[:2])[2]


def _lane(facts: RecomputeFacts, label: str, kind: str, rows: Int64) -> ProofLane:
    calls = facts.calls
    starts, ends = _spans(facts, rows)
    start, end, shown = int(starts.min()), int(ends.max()), rows[:_MOST_OPERATORS].tolist()
    return ProofLane(
        label=label,
        kind=kind,  # type: ignore[arg-type]
        start_us=start / 1000,
        duration_us=(end - start) / 1000,
        ops=tuple(
            ProofOp(
                name=name.removeprefix(vocabulary.ENGINE).removeprefix("aten::"),
                # The kind of a node is what the forward operator's family is called.
                family=family_of_node(name)[1]
                if name.startswith(vocabulary.ENGINE)
                else vocabulary.family_of(name)[0],
                start_us=float(begin) / 1000,
                duration_us=float(over - begin) / 1000,
            )
            for name, begin, over in zip(map(calls.called, shown), starts, ends, strict=False)
        ),
    )


def _spans(facts: RecomputeFacts, rows: Int64) -> tuple[Int64, Int64]:
    """When these calls began and ended where their work was done: on the GPU, from the first of
    their kernels to the last, where they have any; else on the host, ns.

    A call without a kernel among others takes no time, where the one before it ended.
    """
    calls, kernels = facts.calls, facts.kernels
    order = kernels.launch.argsort(kind="stable")
    launch = kernels.launch[order]
    first, last = launch.searchsorted(rows), launch.searchsorted(rows + calls.size[rows] + 1)
    has = last > first
    if not has.any():
        return calls.start[rows], calls.end[rows]
    own = [order[begin:stop] for begin, stop in zip(first[has], last[has], strict=True)]
    starts = np.array([kernels.start[one].min() for one in own], np.int64)
    ends = np.array([kernels.end[one].max() for one in own], np.int64)
    before = np.cumsum(has) - 1
    idle = np.where(before < 0, starts.min(), ends[before])
    return np.where(has, starts[before], idle), np.where(has, ends[before], idle)


def _recomputes(facts: RecomputeFacts, rows: Int64) -> list[Int64]:
    """The second runs of these operators, one array per recompute, in order of time."""
    made = facts.alignment
    found = np.flatnonzero(np.isin(made.original, rows) & made.ran)
    number = made.begins.searchsorted(found, "right")
    return np.split(made.again[found], np.flatnonzero(np.diff(number)) + 1) if len(found) else []


def _backward(facts: RecomputeFacts, rows: Int64, runs: list[Int64]) -> Int64:
    """Engine ranges that compute this block's gradients, without those that hold recomputes.

    After the last recompute of a block comes its backward, up to the first recompute of another.
    """
    calls, structure = facts.calls, facts.structure
    engines = structure.rows(Role.BACKWARD)
    began = int(calls.start[rows[0]])
    until = next((step.end for step in facts.steps if step.start <= began < step.end), 2**62)
    numbered = _of_numbers(structure, engines, rows)
    if not runs:
        behind = calls.start[engines] > calls.end[rows].max()
        return np.asarray(engines[numbered & behind & (calls.start[engines] < until)])
    last = int(calls.end[runs[-1]].max())
    begins = (int(calls.start[each.again].min()) for each in facts.alignment.recomputes)
    until = min([until, *(begin for begin in begins if begin > last)])
    above = calls.parent[engines]
    leaf = ~np.isin(engines, structure.engine[above[above >= 0]])
    mine = (calls.start[engines] >= last) & (calls.end[engines] <= until) & leaf
    # Blocks without a checkpoint may come before the next recompute.
    numbered |= _of_numbers(structure, engines, runs[-1])
    return np.asarray(engines[mine & (numbered if numbered.any() else True)])


def _of_numbers(structure: Structure, engines: Int64, rows: Int64) -> Bool:
    """For each engine range: is its node's number in the range of these operators' numbers?"""
    number = structure.number[rows]
    number, its = number[number >= 0], structure.number[engines]
    if not len(number):
        return np.zeros(len(engines), np.bool_)
    return np.asarray((its >= number.min()) & (its <= number.max()))
