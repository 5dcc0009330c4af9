"""What it costs: time, floating-point operations and memory of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Breakdown:
    """Where one step's time goes on the device that limits it, in ms; sums to the step."""

    forward: float
    recompute: float
    surplus: float
    backward: float
    optimizer: float
    other: float


@dataclass(frozen=True)
class Cost:
    """What the replays cost. ``step_ms`` is a median over ``steps``; see ``method``.

    ``step_low_ms`` and ``step_high_ms`` hold that median with 95 %, below six steps less surely:
    then they are the shortest and the longest. ``None`` with a single step, and in results of
    versions that did not know them, where ``steps`` is 0.

    ``predicted_step_ms`` is the step after the fix, with its interval. ``saving_pct`` is what
    goes, as a share of the step as it is now: so much throughput is lost today. (More time than
    needed is the same difference as a share of the step after: 248.88 s where 185.07 s is enough
    are 34.5 % more time and 25.6 % lost throughput.) It is below 0 where the fix would cost time.
    ``doubt_ms`` says what the prediction could be off by, by cause (95 %); the interval holds all
    of them and the spread of the steps. ``bare_step_ms`` is the step without any recompute.

    ``repeated_collectives_*`` are those inside replays, per step: their time (on the GPU, or of the
    host that starts them), their number, their bytes (of each the larger of what a process puts in
    and gets out) where the trace tells those of all, and the part of their time on the GPU beside
    which no kernel computes.
    """

    step_ms: float
    step_source: Literal["timed", "trace"]
    device: Literal["cpu", "gpu"]
    recompute_ms: float
    surplus_recompute_ms: float
    repeated_collectives_ms: float | None
    predicted_step_ms: float
    predicted_low_ms: float
    predicted_high_ms: float
    saving_pct: float
    breakdown: Breakdown
    method: str
    assumptions: tuple[str, ...] = ()
    replay_error_pct: float | None = None
    doubt_ms: dict[str, float] | None = None
    bare_step_ms: float | None = None
    bare_low_ms: float | None = None
    bare_high_ms: float | None = None
    step_low_ms: float | None = None
    step_high_ms: float | None = None
    steps: int = 0
    repeated_collectives_count: float | None = None
    repeated_collectives_bytes: float | None = None
    repeated_collectives_exposed_ms: float | None = None


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one step, and what share of the device's peak they reach.

    Matrix products, convolutions and attention are counted. ``recompute`` holds all replays,
    ``surplus`` those beyond the first; the optimizer's own are in none. ``mfu`` and ``hfu`` are
    shares of ``peak_tflops``, without and with the replays. ``uncounted`` names costly operators
    that could not be counted, so that the figures are lower bounds; ``reason`` says why there
    are none.
    """

    forward_per_step: float | None = None
    backward_per_step: float | None = None
    recompute_per_step: float | None = None
    surplus_per_step: float | None = None
    hfu_over_mfu: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    peak_tflops: float | None = None
    peak_source: str | None = None
    uncounted: tuple[str, ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class RegionMemory:
    """What the checkpoint of one region keeps out of memory between forward and backward.

    ``ordinal`` is the region's; ``saved_bytes`` is for one micro-batch, ``None`` where the region
    was not replayed while memory was recorded.
    """

    ordinal: int
    saved_bytes: int | None


@dataclass(frozen=True)
class MemoryPlan:
    """The step time and the peak if the regions of these ordinals were not checkpointed."""

    regions: tuple[int, ...]
    step_ms: float
    peak_bytes: int


@dataclass(frozen=True)
class Memory:
    """Memory of one device in one recorded step, and what fewer checkpoints would take of it.

    ``budget_bytes`` is what torch may allocate at most: the capacity without ``reserve_bytes``
    and without what it reserved beyond what it allocated. ``plans`` are the fastest for their
    memory, from the step as it is (surplus replays taken out) to none checkpointed; ``chosen``
    is the place of the fastest that fits. ``reason`` says why there are no plans.
    """

    device: Literal["cpu", "gpu"]
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    capacity_bytes: int | None
    reserve_bytes: int | None
    budget_bytes: int | None
    regions: tuple[RegionMemory, ...]
    plans: tuple[MemoryPlan, ...] = ()
    chosen: int | None = None
    reason: str | None = None


@dataclass(frozen=True)
class DeviceTime:
    """How a device spent its time, as recompute-scan counts it; percentages as in :class:`Hta`.

    The time reaches from the first kernel to the last; what is neither communication nor a copy
    computes.
    """

    kernel_time_ms: float
    idle_pct: float
    compute_pct: float
    non_compute_pct: float
    overlap_pct: float | None


@dataclass(frozen=True)
class Hta:
    """What Holistic Trace Analysis says of the trace; percentages of the GPU's time.

    That time reaches from the first kernel to the last, over all recorded steps. ``overlap_pct``
    is the part of communication that runs beside computation, ``None`` without any;
    ``kernel_types`` are shares of the busy time, of each kind alone and of kinds side by side.
    ``rank`` is whose trace it was, ``own`` what recompute-scan counts of the same trace.
    """

    kernel_time_ms: float
    idle_pct: float
    compute_pct: float
    non_compute_pct: float
    overlap_pct: float | None
    kernel_types: dict[str, float]
    rank: int | None = None
    own: DeviceTime | None = None
