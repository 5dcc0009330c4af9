"""What was measured with the fix applied, beside the unchanged script."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recompute_scan.result.replays import Checkpoint, Verdict

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
# Outcomes whose figures say what the fix does to a step.
MEASURED: tuple[Outcome, ...] = ("helps", "slower", "no-gain", "losses-differ")


@dataclass(frozen=True)
class Arm:
    """One way of running the script (unchanged, with the fix, …), measured without the profiler.

    ``status`` says whether it came through. The step time is the median of all timed steps of
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


@dataclass(frozen=True)
class Losses:
    """The losses of the unchanged script beside those with the fix, in order of backward passes.

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


@dataclass(frozen=True)
class WithPlan:
    """RS301's plan applied in memory, on top of the fix where there is one.

    ``modules`` are those without checkpoints. ``arm`` is ``None`` where their checkpoints could
    not be taken out, and nothing was measured. ``losses`` stand beside those of the unchanged
    script.
    """

    modules: tuple[str, ...]
    arm: Arm | None
    losses: Losses


@dataclass(frozen=True)
class Verified:
    """The fix applied in memory and measured, beside the unchanged script.

    ``outcome``: ``helps`` or ``slower`` where the intervals leave no doubt, ``no-gain`` where
    they leave room for a small saving or loss only, ``unclear`` where they are too wide for
    that, ``losses-differ`` whatever the time, ``not-applied`` where no checkpoint could be taken
    out, ``failed`` where the script did not come through, ``not-tried`` where there was no fix
    to try. Percentages are of the step before (``saving_pct``) and of the step after
    (``more_time_pct``). ``before_peak_bytes`` and ``after_peak_bytes`` are what is allocated on
    a GPU, else the resident memory of the process. ``pairs`` counts neighbouring steps, one
    unchanged and one with the fix, of ``switching_runs`` that switched it on and off; both are 0
    where the other runs answered. ``with_plan`` is ``None`` where RS301 has no plan to try.
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
