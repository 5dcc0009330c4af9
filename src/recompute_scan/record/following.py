"""What one process of a run tells the event stream: its phases, its steps, how its script ended."""

from __future__ import annotations

from recompute_scan.events import (
    AnyEvent,
    EventStream,
    PhaseBegun,
    ScriptEnded,
    StepEnded,
    WarningTold,
)
from recompute_scan.record.execute import Exit
from recompute_scan.record.phase import Phase
from recompute_scan.run_info import RunInfo


class TrainingEvents:
    """Tells it at the end of each step. Phases and steps are those of rank 0.

    Args:
        path: The file of the stream; empty for none.

    Raises:
        UsageError: It cannot be written (``E235``).
    """

    def __init__(self, path: str) -> None:
        self._stream = EventStream(path) if path else None
        self._phase: Phase | None = None

    def boundary(self, phase: Phase, steps: int, rank: int) -> None:
        """So many steps have ended, and this is what the next ones are for."""
        if self._stream is None:
            return
        self._stream.rank = rank
        if rank:
            return
        if steps:
            self._tell(StepEnded(step=steps))
        if phase is not self._phase:
            self._phase = phase
            self._tell(PhaseBegun(phase=phase.event, step=steps))

    def ended(self, outcome: Exit, info: RunInfo, steps: int) -> None:
        """The script has: how, and what the run record warns of."""
        if self._stream is None or outcome.ending == "killed":
            return
        self._stream.rank = info.rank
        for text in (*info.warnings, *filter(None, [info.bug])):
            self._tell(WarningTold(text=text))
        self._tell(
            ScriptEnded(
                ending=outcome.ending,
                exit_status=outcome.exit_status,
                error=outcome.error,
                steps=steps,
            )
        )
        self._stream.close()

    def _tell(self, event: AnyEvent) -> None:
        if self._stream is not None:
            self._stream.tell(event)
