"""What the recomputes cost, by simulating the recorded steps without them.

The step time is that of unprofiled steps where the run wrapper timed some, else that of the
recorded ones. What a change saves is simulated (:mod:`recompute_scan.cost.simulate`) and applied to
the median of these.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recompute_scan.cost.phases import (
    Float64,
    Phases,
    busy_share,
    device_phases,
    host_phases,
    repeated_communication,
)
from recompute_scan.cost.reruns import Keep
from recompute_scan.cost.simulate import Base, Prediction, middle_doubt, predict, prepare
from recompute_scan.intervals import median_interval
from recompute_scan.numpy_tools import median
from recompute_scan.recompute.by_design import time_of
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.result import Breakdown, Checkpoint, Cost

# Below this share of busy time the host, not the GPU, limits the step.
GPU_LIMITS = 0.7
_NS_PER_MS = 1e6


def keep_last(checkpoints: Sequence[Checkpoint]) -> Checkpoint:
    """The innermost checkpoint, which asks for the last recompute."""
    return checkpoints[-1]


def price(
    facts: RecomputeFacts, timed_steps_ms: Sequence[float], keep: Keep = keep_last
) -> Cost | None:
    """The cost of the recomputes; ``None`` when no step is complete.

    Args:
        facts: What ran again.
        timed_steps_ms: Durations of unprofiled steps, ms; empty where there are none.
        keep: Of the checkpoints around a block, outermost first, the one that the fix leaves.
    """
    timed = np.array(timed_steps_ms, np.float64)
    base = prepare(facts, timed * _NS_PER_MS)
    if base is None:
        return None
    on_gpu = busy_share(facts) >= GPU_LIMITS
    phases = device_phases(facts) if on_gpu else host_phases(facts)
    if not phases.step.sum():
        return None
    steps = timed if len(timed) else base.graph.measured / _NS_PER_MS
    typical = median(steps)
    step_low, step_high = median_interval(steps.tolist()) if len(steps) > 1 else (None, None)
    breakdown = _breakdown(phases, typical, by_kernels=on_gpu)
    wasteful = len(facts.counts.redundant_rows) > 0
    fixed = predict(base, keep) if wasteful else Prediction(1.0, {})
    low, high = _interval(fixed, steps) if wasteful else (typical, typical)
    bare = predict(base, None) if facts.alignment.recomputes else None
    bare_low, bare_high = _interval(bare, steps) if bare else (None, None)
    repeated = repeated_communication(facts)
    return Cost(
        step_ms=typical,
        step_source="timed" if len(timed) else "trace",
        device="gpu" if on_gpu else "cpu",
        recompute_ms=breakdown.recompute + breakdown.redundant,
        redundant_recompute_ms=breakdown.redundant,
        repeated_collectives_ms=_repeated_collectives(facts, time_scale(facts, timed_steps_ms)),
        predicted_step_ms=typical * fixed.share,
        predicted_low_ms=low,
        predicted_high_ms=high,
        saving_pct=100 * (1 - fixed.share),
        breakdown=breakdown,
        method="simulation",
        assumptions=_assumptions(base, on_gpu, len(timed), fixed),
        simulation_error_pct=100 * base.error,
        doubt_ms={cause: typical * share for cause, share in fixed.doubts.items()},
        bare_step_ms=typical * bare.share if bare else None,
        bare_low_ms=bare_low,
        bare_high_ms=bare_high,
        step_low_ms=step_low,
        step_high_ms=step_high,
        steps=len(steps),
        repeated_collectives_count=repeated.count if repeated else None,
        repeated_collectives_bytes=repeated.bytes if repeated else None,
        repeated_collectives_exposed_ms=repeated.exposed_ms if repeated else None,
        predicted_late_ms=typical * fixed.late if fixed.late is not None else None,
    )


def _interval(prediction: Prediction, steps: Float64) -> tuple[float, float]:
    """The step after the change (95 %), with what the median step itself could be off by."""
    typical = median(steps)
    middle = typical * prediction.share
    doubt = float(np.hypot(typical * prediction.doubt, prediction.share * middle_doubt(steps)))
    return max(0.0, middle - doubt), middle + doubt


def time_scale(facts: RecomputeFacts, timed_steps_ms: Sequence[float]) -> float:
    """What recorded host times are multiplied with to be set beside the timed step.

    The profiler slows the host down and leaves kernels as they are: 1 where times are kernel
    times, where no step was timed, or where none is complete.
    """
    lengths = [
        s.end - s.start for s, whole in zip(facts.steps, facts.complete, strict=True) if whole
    ]
    if facts.work.on_gpu or not len(timed_steps_ms) or not sum(lengths):
        return 1.0
    return median(timed_steps_ms) / (float(np.mean(lengths)) / _NS_PER_MS)


def _breakdown(phases: Phases, step_ms: float, *, by_kernels: bool) -> Breakdown:
    """Means of all steps, in a step that takes this long.

    The profiler slows the host down and leaves kernels as they are. So the host's phases are shares
    of the step, and those of kernels take the time that they take: what is left is the rest.
    """
    names = ("forward", "recompute", "redundant", "backward", "optimizer")
    parts = {name: float(getattr(phases, name).mean()) / _NS_PER_MS for name in names}
    scale = step_ms / (float(phases.step.mean()) / _NS_PER_MS)
    if by_kernels:
        scale = step_ms / max(step_ms, sum(parts.values()))
    parts = {name: scale * time for name, time in parts.items()}
    return Breakdown(**parts, other=max(0.0, step_ms - sum(parts.values())))


def _repeated_collectives(facts: RecomputeFacts, scale: float) -> float | None:
    """Time per step of collectives that are inside a recompute; ``None`` without any at all."""
    collectives = facts.collectives
    if not len(collectives.rows):
        return None
    total = time_of(facts.calls, facts.kernels, collectives.repeated)
    return total / _NS_PER_MS / facts.complete_count * scale


def _assumptions(base: Base, on_gpu: bool, timed: int, fixed: Prediction) -> tuple[str, ...]:
    count = len(base.steps)
    found = [
        f"{count} recorded {'step was' if count == 1 else 'steps were'} simulated as a graph of "
        "host calls, launches, streams, events and synchronisation, with the redundant runs and "
        "all they launched taken out.",
    ]
    if timed:
        found.append(
            f"What is saved is applied to the median of {timed} steps timed without the profiler."
        )
    else:
        found.append(
            "No step was timed without the profiler, so the recorded steps count, which the "
            "profiler slows down."
        )
    if base.overhead:
        found.append(
            f"The profiler took {2 * base.overhead / 1000:.1f} µs a call, which were taken off "
            "first."
        )
    if fixed.doubts.get("hooks"):
        found.append(
            "What a non-reentrant checkpoint takes for each saved tensor does not show in this "
            "trace; a typical time was assumed, give or take half of it."
        )
    if fixed.late is not None:
        found.append(
            "The recompute that stays is taken to stop early. This trace does not show whether "
            "the script switches that off; if it does, "
            f"{100 * (1 - fixed.late):.1f} % of the step would be saved."
        )
    if base.facts.work.on_gpu and not on_gpu:
        found.append("The GPU is idle for much of the step, so host time limits it.")
    if base.facts.alignment.recomputes:
        found.append(
            "Other processes keep the times at which they reached each collective; memory, and "
            "what it changes, is left as it was."
        )
    return tuple(found)
