"""The phases of a recording, in their order, and what is said of each."""

from __future__ import annotations

from enum import Enum, auto
from typing import cast

from recompute_scan.events import PhaseName
from recompute_scan.record.scope import Plan


class Phase(Enum):
    """What the steps that pass now are for."""

    WARMUP = auto()
    TIMING = auto()
    WAITING = auto()  # for a profiler of the script's own to end
    TRACE = auto()
    STACKS = auto()
    COMPARING = auto()
    COUNTING = auto()  # on a rank that is not to record
    DONE = auto()

    @property
    def event(self) -> PhaseName:
        """Its name in the event stream."""
        return cast("PhaseName", self.name.lower())

    def described(self, plan: Plan) -> str | None:
        """What goes on in this phase, in a few words; ``None`` when nothing does any more."""
        return {
            Phase.WARMUP: f"{_steps(plan.warmup)} to warm up",
            Phase.TIMING: f"timing {_steps(plan.timing)}",
            Phase.WAITING: "waiting for the script's own profiler to end",
            Phase.TRACE: f"profiling {_steps(plan.steps)}",
            Phase.STACKS: "profiling one step with stacks",
            Phase.COMPARING: "comparing recomputes with their forward",
            Phase.COUNTING: f"other ranks record {_steps(plan.wanted)}",
        }.get(self)


def _steps(number: int) -> str:
    return f"{number} step{'s' * (number != 1)}"
