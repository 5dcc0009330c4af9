"""What the replays cost, as excess time on the device that limits the step.

The step time is that of unprofiled steps where the run wrapper timed some. The share of a
step that surplus replays take is read from all recorded steps and applied to the median of the
timed ones. On a GPU the share is the time in which nothing but surplus kernels run, so that work
hidden behind other streams counts as nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recompute_scan.cost.phases import (
    Float64,
    Phases,
    busy_share,
    device_phases,
    exposed_surplus,
    host_phases,
)
from recompute_scan.recompute.facts import Recompute
from recompute_scan.recompute.vocabulary import COLLECTIVE
from recompute_scan.result import Breakdown, Cost

# Below this share of busy time the host, not the GPU, limits the step.
GPU_LIMITS = 0.7
# The interval is at least this share of the saving wide, to each side: a replay's share of a
# profiled step is not exactly its share of an unprofiled one.
SAVING_DOUBT = 0.25
_NS_PER_MS = 1e6


def price(facts: Recompute, timed_steps_ms: Sequence[float]) -> Cost | None:
    """The cost of the replays; ``None`` when no step is complete.

    Args:
        facts: What ran again.
        timed_steps_ms: Durations of unprofiled steps, ms; empty where there are none.
    """
    if not facts.complete.any():
        return None
    on_gpu = busy_share(facts) >= GPU_LIMITS
    phases = device_phases(facts) if on_gpu else host_phases(facts)
    surplus = exposed_surplus(facts) if on_gpu else phases.surplus
    usable = phases.step > 0
    if not usable.any():
        return None
    shares = np.clip(surplus[usable] / phases.step[usable], 0.0, 1.0)
    # The share of all steps together, so that every part of the breakdown adds up.
    share = float(np.clip(surplus[usable].sum() / phases.step[usable].sum(), 0.0, 1.0))
    traced_ms = phases.step[usable] / _NS_PER_MS
    step_ms = np.array(timed_steps_ms, np.float64) if len(timed_steps_ms) else traced_ms
    typical, low, high = (float(q) for q in np.quantile(step_ms, (0.5, 0.25, 0.75)))
    breakdown = _breakdown(phases, typical)
    scale = time_scale(facts, timed_steps_ms)
    return Cost(
        step_ms=typical,
        step_source="timed" if len(timed_steps_ms) else "trace",
        device="gpu" if on_gpu else "cpu",
        recompute_ms=breakdown.recompute + breakdown.surplus,
        surplus_recompute_ms=breakdown.surplus,
        repeated_collectives_ms=_repeated_collectives(facts, scale),
        predicted_step_ms=typical * (1 - share),
        predicted_low_ms=low * (1 - max(float(shares.max()), share * (1 + SAVING_DOUBT))),
        predicted_high_ms=high * (1 - min(float(shares.min()), share * (1 - SAVING_DOUBT))),
        saving_pct=100 * share,
        breakdown=breakdown,
        method="excess-time",
        assumptions=_assumptions(facts, on_gpu, len(timed_steps_ms)),
    )


def time_scale(facts: Recompute, timed_steps_ms: Sequence[float]) -> float:
    """What recorded host times are multiplied with to stand beside the timed step.

    The profiler slows the host down and leaves kernels as they are: 1 where times are kernel
    times, where no step was timed, or where none is complete.
    """
    lengths = [
        s.end - s.start for s, whole in zip(facts.steps, facts.complete, strict=True) if whole
    ]
    if facts.work.on_gpu or not len(timed_steps_ms) or not sum(lengths):
        return 1.0
    return float(np.median(timed_steps_ms)) / (float(np.mean(lengths)) / _NS_PER_MS)


def _breakdown(phases: Phases, step_ms: float) -> Breakdown:
    total = phases.step.sum()

    def part(values: Float64) -> float:
        return float(values.sum() / total) * step_ms

    return Breakdown(
        forward=part(phases.forward),
        recompute=part(phases.recompute),
        surplus=part(phases.surplus),
        backward=part(phases.backward),
        optimizer=part(phases.optimizer),
        other=part(phases.other),
    )


def _repeated_collectives(facts: Recompute, scale: float) -> float | None:
    """Host time per step of collectives that stand inside a replay; ``None`` without any."""
    calls = facts.calls
    collective = calls.named(COLLECTIVE)
    if not len(collective):
        return None
    # Only the outermost range of one collective counts.
    parent = np.maximum(calls.parent[collective], 0)
    names = calls.matching(COLLECTIVE)[calls.name[parent]]
    collective = collective[(calls.parent[collective] < 0) | ~names]
    total = 0
    for replay in facts.alignment.replays:
        first, last = calls.start[replay.again].min(), calls.end[replay.again].max()
        thread = calls.thread[replay.again[0]]
        inside = (
            (calls.thread[collective] == thread)
            & (calls.start[collective] >= first)
            & (calls.end[collective] <= last)
        )
        total += int(calls.duration[collective[inside]].sum())
    return total / _NS_PER_MS / facts.complete_count * scale


def _assumptions(facts: Recompute, on_gpu: bool, timed: int) -> tuple[str, ...]:
    basis = (
        "Share of the step in which the GPU runs nothing but surplus replays."
        if on_gpu
        else "Share of the step that the host spends in surplus replays."
    )
    clock = (
        f"Applied to the median of {timed} steps timed without the profiler."
        if timed
        else "Applied to the median of the recorded steps, which the profiler slows down."
    )
    doubt = (
        f"The interval spans the steps and at least {100 * SAVING_DOUBT:.0f} % of the saving to "
        "each side."
    )
    found = [
        basis,
        clock,
        doubt,
        "Collectives that a replay repeats outside its operators are left out.",
    ]
    if facts.work.on_gpu and not on_gpu:
        found.append("The GPU is idle for much of the step, so host time limits it.")
    return tuple(found)
