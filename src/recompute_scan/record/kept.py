"""How far a recording has come, and what it keeps: files, step times, what is to be said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import Struct, field

from recompute_scan.deciding import Policies
from recompute_scan.faithful import Fidelity
from recompute_scan.record.phase import Phase
from recompute_scan.record.profiler import ProfilerWindow


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
