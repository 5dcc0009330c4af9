"""From the measured memory to plans: what fewer checkpoints would take and give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from recompute_scan.cost.machine import Machine, capacity
from recompute_scan.cost.memory import Footprint
from recompute_scan.cost.plan import best, build_problem, curve
from recompute_scan.result import Cost, Memory, MemoryPlan, Region, RegionMemory
from recompute_scan.trace.columns import Bool, Trace

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
        cost: Price of the replays.
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
        return "No checkpointed region was replayed while memory was recorded."
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
    """What a step gains by each region, ms: its share in the replays that are needed today."""
    needed = [
        max(0.0, region.recompute_ms_per_step - region.surplus_ms_per_step)
        if footprint.saved(place) is not None
        else 0.0
        for place, region in enumerate(regions)
    ]
    everywhere = sum(r.recompute_ms_per_step - r.surplus_ms_per_step for r in regions)
    scale = cost.breakdown.recompute / everywhere if everywhere > 0 else 0.0
    return [scale * time for time in needed]
