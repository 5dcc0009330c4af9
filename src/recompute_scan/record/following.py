"""What a process under observation tells while it trains: phases, steps, or that it makes none.

Without steps nothing is recorded, and who trains for days should not learn that at the end.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from recompute_scan.events import (
    AnyEvent,
    EventStream,
    PhaseBegun,
    ScriptEnded,
    StepEnded,
    WarningTold,
)
from recompute_scan.record.execute import Exit
from recompute_scan.record.guard import Call, Guard
from recompute_scan.record.launch.launcher import rank_facts
from recompute_scan.record.patches import Patches
from recompute_scan.record.phase import Phase
from recompute_scan.record.steps import StepCounter, in_backward
from recompute_scan.run_info import RunInfo

# More than most scripts have micro-batches in a step.
PASSES = 50


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


class Unstepped:
    """Counts backward passes until the first step, or until it has said that there is none."""

    def __init__(self, counter: StepCounter, guard: Guard) -> None:
        self._counter = counter
        self._guard = guard
        self._passes = 0
        self._over = False
        self._patches = Patches()

    def install(self) -> None:
        """Begin to count."""
        real = torch.autograd.backward
        self._patches.replace(torch.autograd, "backward", self._guard.around(real, self._backward))

    def remove(self) -> None:
        """Count no more."""
        self._over = True
        self._patches.undo()

    def _backward(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        if self._over or in_backward():
            return result
        self._passes += 1
        if self._counter.steps or self._passes >= PASSES:
            self.remove()
            if not self._counter.steps and rank_facts().rank == 0:
                self._say()
        return result

    def _say(self) -> None:
        print(
            f"recompute-scan: {self._passes} backward passes, and no step of a torch.optim "
            "optimizer so far: without steps nothing is recorded.\ntry: call "
            "recompute_scan.step() at the end of each step",
            file=sys.stderr,
            flush=True,
        )
