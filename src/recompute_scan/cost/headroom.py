"""Which regions to stop checkpointing: the most time for the memory that there is, exactly.

Each region x (0 or 1) gives its recompute time back and holds its tensors from its forward run to
where its recompute begins today. At every moment what is allocated today and what is held beside it
must fit, which gives one linear constraint for each set of regions that hold something at once.
HiGHS solves it (``docs/decisions/memory-plan.md``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.cost.footprint import Footprint
from recompute_scan.cost.peaks import Machine, capacity
from recompute_scan.cost.solver import silent_solver
from recompute_scan.result import Cost, Memory, MemoryPlan, Region, RegionMemory
from recompute_scan.trace.columns import Bool, Int64, Trace

Float64 = npt.NDArray[np.float64]

# Of two equal choices the later region is preferred: it holds its tensors for a shorter time.
_PREFERENCE = 1e-6
_TIME_LIMIT_S = 5.0
# The solver gets MiB, so that its coefficients are of one size.
_SCALE = 2.0**20


class Problem(Struct, frozen=True):
    """When how much is allocated, and what every layer would add.

    Attributes:
        base: Most that is allocated today in each span of time, bytes.
        added: Bytes that each layer (column) would add in each span (row).
    """

    base: Int64
    added: Int64

    def peak(self, chosen: Bool) -> int:
        """Most that would be allocated with these layers not checkpointed, bytes."""
        return int((self.base + self.added @ chosen.astype(np.int64)).max(initial=0))


def build_problem(footprint: Footprint, layers: int) -> Problem:
    """The constraints, one for each set of layers that hold something at once.

    Args:
        footprint: The memory of the recorded steps.
        layers: Number of layers.
    """
    times = [t for held in footprint.held for t in (held.start, held.end)]
    edges = np.unique(np.array(times, np.int64))
    starts = np.concatenate(([np.iinfo(np.int64).min], edges)).astype(np.int64)
    stops = np.concatenate((edges, [np.iinfo(np.int64).max])).astype(np.int64)
    added = np.zeros((len(starts), layers), np.int64)
    for held in footprint.held:
        active = (starts >= held.start) & (stops <= held.end)
        added[active, held.layer] += held.size
    base = _most_in(footprint, starts, stops)
    return _merged(base, added)


def best(problem: Problem, gain: Sequence[float], budget: int) -> Bool | None:
    """The layers to stop checkpointing for the most gain within the budget.

    Args:
        problem: See :func:`build_problem`.
        gain: What each layer gives back, in ms; 0 for one that must stay.
        budget: Most that may be allocated, bytes.

    Returns:
        One entry per layer; ``None`` where not even today's memory fits.
    """
    gains = np.asarray(gain, np.float64)
    if problem.base.max(initial=0) > budget:
        return None
    everything = gains > 0
    if problem.peak(everything) <= budget:
        return everything
    return _solve(problem, gains, budget)


def curve(problem: Problem, gain: Sequence[float], points: int = 16) -> list[tuple[Bool, int]]:
    """Choices that are fastest for their memory, with their peaks, from nothing to everything."""
    nothing = np.zeros(len(gain), np.bool_)
    everything = np.asarray(gain, np.float64) > 0
    low, high = problem.peak(nothing), problem.peak(everything)
    found: list[tuple[Bool, int]] = [(nothing, low)]
    for budget in np.linspace(low, high, points)[:-1].astype(np.int64).tolist():
        choice = best(problem, gain, int(budget))
        if choice is not None:
            _append(found, choice, problem, gain)
    _append(found, everything, problem, gain)
    return found


def _append(
    found: list[tuple[Bool, int]], choice: Bool, problem: Problem, gain: Sequence[float]
) -> None:
    def value(chosen: Bool) -> float:
        return float(np.asarray(gain, np.float64)[chosen].sum())

    if value(choice) > value(found[-1][0]):
        found.append((choice, problem.peak(choice)))


def _solve(problem: Problem, gains: Float64, budget: int) -> Bool:
    highspy, solver = silent_solver(_TIME_LIMIT_S)
    order = np.arange(1, len(gains) + 1) / len(gains)
    worth = gains / gains.max() * (1 + _PREFERENCE * order)
    chosen = [
        solver.addBinary(obj=float(-value)) if value > 0 else None for value in worth.tolist()
    ]
    for base, added in zip(problem.base.tolist(), problem.added.tolist(), strict=True):
        terms = [(x, size) for x, size in zip(chosen, added, strict=True) if x is not None and size]
        if terms:
            solver.addRow(
                -highspy.kHighsInf,
                (budget - base) / _SCALE,
                len(terms),
                np.array([x.index for x, _ in terms], np.int32),
                np.array([size / _SCALE for _, size in terms], np.float64),
            )
    solver.run()
    values = np.array([x is not None and solver.val(x) > 0.5 for x in chosen], np.bool_)
    # Found in floating point: what does not fit to the byte gives way, the least gain first.
    for place in gains.argsort(kind="stable"):
        if problem.peak(values) <= budget:
            break
        values[place] = False
    return values


def _most_in(footprint: Footprint, starts: Int64, stops: Int64) -> Int64:
    """Most that is allocated within each span, what is there at its start included."""
    ts, allocated = footprint.ts, footprint.allocated
    first = ts.searchsorted(starts, side="right") - 1
    last = ts.searchsorted(stops, side="left")
    return np.array(
        [
            int(allocated[max(0, before) : max(behind, before + 1)].max(initial=0))
            for before, behind in zip(first.tolist(), last.tolist(), strict=True)
        ],
        np.int64,
    )


def _merged(base: Int64, added: Int64) -> Problem:
    """One row for each distinct set; the most that is allocated counts."""
    rows, which = np.unique(added, axis=0, return_inverse=True)
    most = np.zeros(len(rows), np.int64)
    np.maximum.at(most, which.reshape(-1), base)
    return Problem(most, rows)


# Kept free of the capacity: the CUDA context and NCCL's buffers, which torch does not count,
# fragmentation that grows with what is allocated, and steps larger than the recorded one.
RESERVE = 0.10


def weigh_memory(
    footprint: Footprint,
    trace: Trace,
    regions: Sequence[Region],
    cost: Cost | None,
    machine: Machine,
) -> Memory:
    """The memory of the recorded step, and the plans for the regions.

    Args:
        footprint: The memory of a step of the same run.
        trace: The trace that it was recorded in.
        regions: One row per layer of the run.
        cost: Price of the recomputes.
        machine: What a person says of the device.
    """
    gpu = footprint.device >= 0
    has = machine.memory_bytes or capacity(trace, footprint.device)
    reserve = round(RESERVE * has) if has and gpu else None
    peak, reserved = footprint.peak_allocated, footprint.peak_reserved
    apart = max(0, (reserved or peak) - peak)
    budget = has - reserve - apart if has and reserve is not None else None
    same = [region.module for region in regions] == list(footprint.modules)
    memory = Memory(
        device="gpu" if gpu else "cpu",
        # Where the host computes, only what was allocated while recording is known.
        peak_allocated_bytes=peak if gpu else None,
        peak_reserved_bytes=reserved,
        capacity_bytes=has if gpu else None,
        reserve_bytes=reserve,
        budget_bytes=budget,
        regions=tuple(
            RegionMemory(region.ordinal, footprint.saved(place) if same else None)
            for place, region in enumerate(regions)
        ),
    )
    reason = _why_no_plan(gpu, same, cost, budget, footprint)
    if reason is not None or cost is None or budget is None:
        return replace(memory, reason=reason)
    gains = _gains(regions, cost, footprint)
    problem = build_problem(footprint, len(regions))
    choices = curve(problem, gains)
    fitting = best(problem, gains, budget)
    if fitting is not None:
        choices.append((fitting, problem.peak(fitting)))
    plans = sorted(
        {_plan(choice, peak, regions, gains, cost.predicted_step_ms) for choice, peak in choices},
        key=lambda plan: (plan.peak_bytes, -plan.step_ms),
    )
    within = [place for place, plan in enumerate(plans) if plan.peak_bytes <= budget]
    chosen = min(within, key=lambda place: plans[place].step_ms, default=None)
    return replace(memory, plans=tuple(plans), chosen=chosen)


def _why_no_plan(
    gpu: bool, same: bool, cost: Cost | None, budget: int | None, footprint: Footprint
) -> str | None:
    if not gpu:
        return "The tensors lie in the host's memory, which other programs share."
    if not footprint.held:
        return "No checkpointed region was recomputed while memory was recorded."
    if not same:
        return "The step that memory was recorded in has other regions than the trace."
    if budget is None:
        return "How much memory the GPU has is not known: --memory-gib says it."
    return None if cost else "There is no step time to gain from."


def _plan(
    choice: Bool, peak: int, regions: Sequence[Region], gains: Sequence[float], step_ms: float
) -> MemoryPlan:
    out = np.flatnonzero(choice).tolist()
    return MemoryPlan(
        regions=tuple(regions[place].ordinal for place in out),
        step_ms=step_ms - sum(gains[place] for place in out),
        peak_bytes=peak,
    )


def _gains(regions: Sequence[Region], cost: Cost, footprint: Footprint) -> list[float]:
    """What a step gains by each region, ms: its share in the recomputes that are needed today."""
    needed = [
        max(0.0, region.recompute_ms_per_step - region.redundant_ms_per_step)
        if footprint.saved(place) is not None
        else 0.0
        for place, region in enumerate(regions)
    ]
    everywhere = sum(r.recompute_ms_per_step - r.redundant_ms_per_step for r in regions)
    scale = cost.breakdown.recompute / everywhere if everywhere > 0 else 0.0
    return [scale * time for time in needed]
