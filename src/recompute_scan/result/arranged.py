"""The part of the result that ``plan`` adds: what to recompute, and what that takes."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

# Both were measured the same way: further apart they are not the same arrangement.
_SAME_STEP = 0.01

PlanOutcome = Literal[
    "helps", "fits", "no-gain", "slower", "unclear", "does-not-fit", "failed", "not-tried"
]


class PlanPoint(Struct, frozen=True):
    """One arrangement of checkpoints.

    Attributes:
        recomputed: Number of modules that are recomputed; ``None`` for today's, whose checkpoints
            may be of other kinds.
        step_ms: How long a step takes.
        peak_bytes: Most that is saved for the backward pass at once, what a recompute makes again
            included; on a GPU the most that is allocated.
        measured: Whether both were measured, and not worked out.
        selective: How many of the recomputed ones keep the results of heavy operators.
        offloaded: Number of modules whose saved tensors go to the host.
        in_part: Number of modules of which only parts are recomputed; ``recomputed`` is without
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
    """What the plan does with one module.

    Attributes:
        module: Its name.
        module_class: Its class.
        checkpointed: Whether it is checkpointed today.
        recompute: Whether the plan recomputes all of it.
        again_ms: What its recompute takes of a step; what it would take, where it is kept.
        saved_bytes: What its operators save in one forward run where it is not recomputed.
        selective: Whether its checkpoint keeps the results of heavy operators.
        offloaded: Whether what it saves goes to the host until its backward pass; ``again_ms`` is
            then what that takes.
        parts: Names, below its own, of the parts that the plan recomputes instead; ``again_ms`` is
            then what these take.
        parts_today: Names of the parts that have a checkpoint of their own today.
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
        """What the plan puts a checkpoint around: the module, some parts, or nothing."""
        return self.names_of_parts(self.parts) if not self.recompute else (self.module,)

    def names_of_parts(self, parts: tuple[str, ...]) -> tuple[str, ...]:
        """Whole names of these parts."""
        return tuple(f"{self.module}.{part}" for part in parts)


class PlanProof(Struct, frozen=True):
    """The plan applied in memory, in turn with the unchanged script, in the same processes.

    Attributes:
        outcome: What that showed. ``fits``: it keeps the limit, which today's arrangement does
            not; ``helps``: it is faster than that. A plan with another outcome is taken back.
        today_step_ms: Median step of the unchanged script.
        step_ms: Median step with the plan.
        predicted_step_ms: The step that was predicted, on the day's clock: the predicted share of
            today's step, of ``today_step_ms``.
        ratio_low: The step with the plan is at least this share of today's.
        ratio_high: At most this.
        peak_bytes: Most that was saved, or allocated, at once.
        predicted_bytes: What had been worked out.
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
        operators: Those whose results selective checkpoints of the plan keep.
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
