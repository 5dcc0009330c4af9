"""The phases of a recording, and what it keeps: files, step times, what is to be said of it."""

from __future__ import annotations

from enum import Enum, auto
from pathlib import Path
from typing import Literal, cast

from msgspec import Struct, field

from recompute_scan.deciding import Policies
from recompute_scan.events import PhaseName
from recompute_scan.faithful import Fidelity
from recompute_scan.record.profiler import ProfilerWindow
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


class RecordedSoFar(Struct):
    """What has been recorded so far.

    Attributes:
        folder: Where the traces go.
        phase: What the steps that pass now are for.
        device: ``cpu`` or ``cuda``, known once the warm-up is over.
        warmup_steps: Steps before the first timed or profiled one.
        timed_ms: Durations of the timed steps.
        trace: File name of the trace, once written.
        stacks: File name of the trace with stacks, once written.
        profiled: Complete steps in the trace.
        fidelity: What comparing a step has shown, once it was.
        policies: What policies of selective checkpoints decided in a step, once it was seen.
        warnings: What the person should know.
        failure: Why recording had to be given up.
    """

    folder: Path
    phase: Phase = Phase.WARMUP
    device: Literal["cpu", "cuda"] = "cpu"
    warmup_steps: int = 0
    timed_ms: tuple[float, ...] = ()
    trace: str | None = None
    stacks: str | None = None
    profiled: int = 0
    fidelity: Fidelity | None = None
    policies: Policies | None = None
    warnings: list[str] = field(default_factory=list)
    failure: str | None = None

    def save_trace(self, window: ProfilerWindow, rank: int) -> None:
        """Write what a window without stacks holds."""
        name = f"trace-rank{rank}.json.gz"
        window.export(self.folder / name)
        self.trace, self.profiled = name, window.completed

    def save_stacks(self, window: ProfilerWindow, rank: int) -> None:
        """Write what the window with stacks holds."""
        name = f"stacks-rank{rank}.json.gz"
        window.export(self.folder / name)
        self.stacks = name

    def warn(self, text: str) -> None:
        """Say something to the person, once."""
        if text not in self.warnings:
            self.warnings.append(text)
