"""The cost of recomputation: time, floating-point operations and memory of a step, predicted and
measured, and the plan.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from recompute_scan.intervals import is_rough, too_wide
from recompute_scan.result.recompute import Checkpoint, Verdict


class Breakdown(Struct, frozen=True):
    """Where one step's time goes on the device that limits it, in ms; sums to the step."""

    forward: float
    recompute: float
    redundant: float
    backward: float
    optimizer: float
    other: float


class Cost(Struct, frozen=True):
    """The cost of the recomputes. ``step_ms`` is a median over ``steps``; see ``method``.

    ``step_low_ms`` and ``step_high_ms`` hold that median with 95 %, below six steps less surely:
    then they are the shortest and the longest. ``None`` with a single step, and in results of
    versions that did not know them, where ``steps`` is 0.

    ``predicted_step_ms`` is the step after the fix, with its interval. ``saving_pct`` is what
    goes, as a share of the step as it is now: so much throughput is lost today. (More time than
    needed is the same difference as a share of the step after: 248.88 s where 185.07 s is enough
    are 34.5 % more time and 25.6 % lost throughput.) It is below 0 where the fix would cost time.
    ``doubt_ms`` says what the prediction could be off by, by cause (95 %); the interval holds all
    of them and the spread of the steps. ``predicted_late_ms`` is the step after the fix if the
    script switches early stop off, where that matters and the trace does not show it, else
    ``None``. ``bare_step_ms`` is the step without any recompute.

    ``repeated_collectives_*`` are those inside recomputes, per step: their time (on the GPU, or of
    the host that starts them), their number, their bytes (of each the larger of a process's input
    and output) where the trace has the bytes of all, and the part of their time on the GPU in which
    no kernel computes.
    """

    step_ms: float
    step_source: Literal["timed", "trace"]
    device: Literal["cpu", "gpu"]
    recompute_ms: float
    redundant_recompute_ms: float
    repeated_collectives_ms: float | None
    predicted_step_ms: float
    predicted_low_ms: float
    predicted_high_ms: float
    saving_pct: float
    breakdown: Breakdown
    method: str
    assumptions: tuple[str, ...] = ()
    simulation_error_pct: float | None = None
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
    predicted_late_ms: float | None = None

    @property
    def times_vary(self) -> bool:
        """Whether the steps vary so much that no figure can rest on their median."""
        low, high = self.step_low_ms, self.step_high_ms
        return low is not None and high is not None and too_wide(self.step_ms, low, high)

    @property
    def saving_is_rough(self) -> bool:
        """Whether the digits of the saving say nothing."""
        saved = self.step_ms - self.predicted_step_ms
        unsure = is_rough(saved, self.predicted_low_ms, self.predicted_high_ms)
        return self.times_vary or (saved > 0 and unsure)


class Flops(Struct, frozen=True):
    """Floating-point operations of one step, and what share of the device's peak they reach.

    Matrix products, convolutions and attention are counted. ``recompute`` holds all recomputes,
    ``redundant`` those beyond the first; the optimizer's own are in none. ``mfu`` and ``hfu`` are
    shares of ``peak_tflops``, without and with the recomputes. ``uncounted`` names costly operators
    that could not be counted, so that the figures are lower bounds; ``reason`` says why there
    are none.
    """

    forward_per_step: float | None = None
    backward_per_step: float | None = None
    recompute_per_step: float | None = None
    redundant_per_step: float | None = None
    hfu_over_mfu: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    peak_tflops: float | None = None
    peak_source: str | None = None
    uncounted: tuple[str, ...] = ()
    reason: str | None = None


class RegionMemory(Struct, frozen=True):
    """Bytes that the checkpoint of one region keeps out of memory between forward and backward.

    ``ordinal`` is the region's; ``saved_bytes`` is for one micro-batch, ``None`` where the region
    was not recomputed while memory was recorded.
    """

    ordinal: int
    saved_bytes: int | None


class MemoryPlan(Struct, frozen=True):
    """The step time and the peak if the regions of these ordinals were not checkpointed."""

    regions: tuple[int, ...]
    step_ms: float
    peak_bytes: int


class Memory(Struct, frozen=True):
    """Memory of one device in one recorded step, and what fewer checkpoints would take of it.

    ``budget_bytes`` is what torch may allocate at most: the capacity without ``reserve_bytes``
    and without what it reserved beyond what it allocated. ``plans`` are the fastest for their
    memory, from the step as it is (redundant recomputes taken out) to none checkpointed; ``chosen``
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

    def __post_init__(self) -> None:
        """Refuse a result, which others may have written, that names a plan it does not have."""
        if self.chosen is not None and not 0 <= self.chosen < len(self.plans):
            raise ValueError(f"there is no plan {self.chosen}")


class DeviceTime(Struct, frozen=True):
    """How a device spent its time, as recompute-scan counts it; percentages as in :class:`Hta`.

    The time reaches from the first kernel to the last; kernels that neither communicate nor copy
    compute.
    """

    kernel_time_ms: float
    idle_pct: float
    compute_pct: float
    non_compute_pct: float
    overlap_pct: float | None


class Hta(DeviceTime, frozen=True):
    """The figures of Holistic Trace Analysis for the trace; percentages of the GPU's time.

    That time reaches from the first kernel to the last, over all recorded steps. ``overlap_pct``
    is the part of communication that runs during computation, ``None`` without any;
    ``kernel_types`` are shares of the busy time, of each kind alone and of kinds side by side.
    ``rank`` is the trace's rank, ``own`` recompute-scan's count of the same trace.
    """

    kernel_types: dict[str, float]
    rank: int | None = None
    own: DeviceTime | None = None


Outcome = Literal[
    "helps",
    "slower",
    "no-gain",
    "unclear",
    "losses-differ",
    "not-applied",
    "failed",
    "not-tried",
]
# Outcomes with figures that show the effect of the fix on a step.
MEASURED: tuple[Outcome, ...] = ("helps", "slower", "no-gain", "losses-differ")


class Arm(Struct, frozen=True):
    """One way of running the script (unchanged, with the fix, …), measured without the profiler.

    ``status`` says whether it ran to its end. The step time is the median of all timed steps of
    all ``runs``; ``low`` and ``high`` hold the 95 % interval of every run's own median, so that
    they show how far the runs differ too. Where runs switched the fix on and off, the steps of
    those are taken instead, and the median with the fix is the one without it times the median
    ratio of neighbouring steps. Memory is the peak over the timed steps, of the rank
    that needs most: allocated and reserved on the GPU, resident of the process.
    ``recompute_per_backward`` and ``verdict`` are read off a trace recorded after the timing.
    """

    status: Literal["measured", "out-of-memory", "failed"]
    message: str | None = None
    runs: int = 0
    timed_steps: int = 0
    step_ms: float | None = None
    step_low_ms: float | None = None
    step_high_ms: float | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_rss_bytes: int | None = None
    verdict: Verdict | None = None
    recompute_per_backward: float | None = None


class Losses(Struct, frozen=True):
    """The losses of the script without and with the fix, in order of backward passes.

    ``status`` is ``equal`` only where all bits are; ``not-repeatable`` where the unchanged script
    gave other losses the second time, and those with the fix are not far from them; ``different``
    where they are (ten times as far, and by a thousandth of the largest loss, or no number), or
    where the unchanged script repeats its own; ``not-seen`` where no scalar went through
    ``backward``. Differences are the largest absolute ones, ``null`` where one is no number.
    """

    status: Literal["equal", "different", "not-repeatable", "not-seen"]
    compared: int = 0
    largest_difference: float | None = None
    repeat_difference: float | None = None
    seeded_by_script: bool | None = None


class WithPlan(Struct, frozen=True):
    """RS301's plan applied in memory, on top of the fix where there is one.

    ``modules`` are those without checkpoints. ``arm`` is ``None`` where their checkpoints could
    not be taken out, and nothing was measured. ``losses`` compares them with the unchanged
    script's.
    """

    modules: tuple[str, ...]
    arm: Arm | None
    losses: Losses


class GradientDistance(Struct, frozen=True):
    """How far one gradient or buffer is from the other run's, as a share of its norm.

    ``distance`` is ``null`` where one of the two runs has none.
    """

    name: str
    is_buffer: bool
    distance: float | None


class Gradients(Struct, frozen=True):
    """Gradients and buffers after the first step, compared with another run from the same seeds.

    ``status`` is ``equal`` where all bits are, ``rounding`` where no more than that lies between,
    ``not-repeatable`` where the script itself gives others each time, ``not-seen`` where there
    were none. ``worst`` names those that are furthest off, at most ten. ``in_parts`` is set where
    memory did not suffice for a run without any checkpoint: of so many blocks they were taken out,
    in several runs that had some of them each.
    """

    status: Literal["equal", "rounding", "different", "not-repeatable", "not-seen"]
    compared: int = 0
    worst: tuple[GradientDistance, ...] = ()
    in_parts: int | None = None


class Verified(Struct, frozen=True):
    """The fix applied in memory and measured, with the unchanged script for comparison.

    ``outcome``: ``helps`` or ``slower`` where the intervals leave no doubt, ``no-gain`` where
    they leave room for a small saving or loss only, ``unclear`` where they are too wide for
    that, ``losses-differ`` whatever the time, ``not-applied`` where no checkpoint could be taken
    out, ``failed`` where the script did not run to its end, ``not-tried`` where there was no fix
    to try. Percentages are of the step before (``saving_pct``) and of the step after
    (``more_time_pct``). ``before_peak_bytes`` and ``after_peak_bytes`` are what is allocated on
    a GPU, else the resident memory of the process. ``pairs`` counts neighbouring steps, one
    unchanged and one with the fix, of ``switching_runs`` that switched it on and off; both are 0
    where the other runs answered. ``with_plan`` is ``None`` where RS301 has no plan to try.
    ``gradients`` compares the unchanged script with itself without any checkpoint, and
    ``gradients_with_fix`` the script with the fix. ``memory_grew_bytes`` is how much higher the
    peak is with the fix, where it was higher in each run with it than in every one without; else
    ``None``.
    """

    outcome: Outcome
    removed: tuple[Checkpoint, ...]
    before_step_ms: float | None
    after_step_ms: float | None
    saving_ms: float | None
    saving_low_ms: float | None
    saving_high_ms: float | None
    saving_pct: float | None
    more_time_pct: float | None
    before_peak_bytes: int | None
    after_peak_bytes: int | None
    losses_equal: bool | None
    losses: Losses
    before: Arm
    after: Arm | None = None
    without_checkpointing: Arm | None = None
    switching_runs: int = 0
    pairs: int = 0
    with_plan: WithPlan | None = None
    gradients: Gradients | None = None
    gradients_with_fix: Gradients | None = None
    memory_grew_bytes: int | None = None

    @property
    def saving_is_rough(self) -> bool:
        """Whether the fix was measured to help, by an amount too uncertain for digits."""
        saved, low, high = self.saving_ms, self.saving_low_ms, self.saving_high_ms
        if self.outcome != "helps" or saved is None or low is None or high is None:
            return False
        return is_rough(saved, low, high)


# Both were measured the same way: further apart they are not the same arrangement.
_SAME_STEP = 0.01

PlanOutcome = Literal[
    "helps", "fits", "no-gain", "slower", "unclear", "does-not-fit", "failed", "not-tried"
]


class PlanPoint(Struct, frozen=True):
    """One arrangement of checkpoints.

    Attributes:
        recomputed: Number of modules that are recomputed; ``None`` for today's script: its
            checkpoints may be of other kinds.
        step_ms: How long a step takes.
        peak_bytes: Most that is saved for the backward pass at once, what a recompute makes again
            included; on a GPU the most that is allocated.
        measured: Whether both were measured, and not worked out.
        selective: How many of the recomputed ones keep the results of heavy operators.
        offloaded: Number of modules that send their saved tensors to the host.
        in_part: Number of modules that are recomputed only in part; ``recomputed`` is without
            them.
    """

    recomputed: int | None
    step_ms: float
    peak_bytes: int
    measured: bool = False
    selective: int = 0
    offloaded: int = 0
    in_part: int = 0


class PlannedModule(Struct, frozen=True):
    """One module in the plan.

    Attributes:
        module: Its name.
        module_class: Its class.
        checkpointed: Whether it is checkpointed today.
        recompute: Whether the plan recomputes all of it.
        again_ms: Time of its recompute per step; where it is kept, the time that one would take.
        saved_bytes: Bytes that its operators save in one forward run where it is not recomputed.
        selective: Whether its checkpoint keeps the results of heavy operators.
        offloaded: Whether what it saves goes to the host until its backward pass; ``again_ms`` is
            then what that takes.
        parts: Names, below its own, of the parts that the plan recomputes instead; ``again_ms`` is
            then what these take.
        parts_today: Names of the parts that have a checkpoint today.
    """

    module: str
    module_class: str
    checkpointed: bool
    recompute: bool
    again_ms: float
    saved_bytes: int
    selective: bool = False
    offloaded: bool = False
    parts: tuple[str, ...] = ()
    parts_today: tuple[str, ...] = ()

    @property
    def stays(self) -> bool:
        """Does the plan checkpoint it as it is checkpointed today?"""
        as_today = self.recompute == self.checkpointed and self.parts == self.parts_today
        return as_today and not self.selective and not self.offloaded

    @property
    def checkpointed_names(self) -> tuple[str, ...]:
        """The names that the plan puts a checkpoint around: the module, some parts, or nothing."""
        return self.names_of_parts(self.parts) if not self.recompute else (self.module,)

    def names_of_parts(self, parts: tuple[str, ...]) -> tuple[str, ...]:
        """Whole names of these parts."""
        return tuple(f"{self.module}.{part}" for part in parts)


class PlanProof(Struct, frozen=True):
    """The plan applied in memory, in turn with the unchanged script, in the same processes.

    Attributes:
        outcome: What that showed. ``fits``: it keeps the limit, which today's arrangement does
            not; ``helps``: it is faster than that. A plan with another outcome is rejected.
        today_step_ms: Median step of the unchanged script.
        step_ms: Median step with the plan.
        predicted_step_ms: The step that was predicted, on the day's clock: the predicted share of
            today's step, of ``today_step_ms``.
        ratio_low: The step with the plan is at least this share of today's.
        ratio_high: At most this.
        peak_bytes: Most that was saved, or allocated, at once.
        predicted_bytes: What had been worked out.
        today_bytes: Most that the unchanged script saved, or allocated, at once in turn with it.
        ranks: How many ranks it was applied to, alike. The one that takes most says what it takes,
            the slowest how long a step is.
    """

    outcome: PlanOutcome
    today_step_ms: float | None = None
    step_ms: float | None = None
    predicted_step_ms: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    peak_bytes: int | None = None
    predicted_bytes: int | None = None
    ranks: int = 1
    today_bytes: int | None = None


class ActivationPlan(Struct, frozen=True):
    """Which modules to recompute, within a limit.

    Attributes:
        device: What the memory is of: what is saved for the backward pass on a CPU, what torch
            allocates on a GPU.
        asked: The limit, in the words of the command line.
        budget_bytes: It, as memory; ``None`` where a step time was asked for.
        limit_ms: It, as a step time; ``None`` where memory was given.
        today: The script as it is.
        least: What takes the least memory.
        most: Nothing recomputed.
        plan: What was chosen, as predicted.
        curve: The fastest arrangements for their memory, from the smallest to the largest.
        modules: What happens to each module, in the order in which they run.
        setting: What to change, in words, one sentence each.
        code: Python that makes the arrangement, to be put in behind the model's making; empty where
            none is needed.
        proof: What the plan was measured to do.
        remarks: What the person should know, one sentence each.
        operators: Operators with results that selective checkpoints of the plan keep.
    """

    device: Literal["cpu", "gpu"]
    asked: str
    budget_bytes: int | None
    limit_ms: float | None
    today: PlanPoint
    least: PlanPoint
    most: PlanPoint
    plan: PlanPoint
    curve: tuple[PlanPoint, ...]
    modules: tuple[PlannedModule, ...]
    setting: tuple[str, ...]
    code: str
    proof: PlanProof
    remarks: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()

    @property
    def as_today(self) -> bool:
        """Is it the arrangement that the script has? Of two checkpoints around one module, which
        hold as much as one, the plan is faster.
        """
        return (
            self.proof.outcome not in ("does-not-fit", "failed")
            and self.plan.peak_bytes == self.today.peak_bytes
            and self.plan.step_ms >= (1 - _SAME_STEP) * self.today.step_ms
            and all(one.stays for one in self.modules)
        )
