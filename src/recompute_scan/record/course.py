"""The course of a process under observation: phases and steps, as it is told, and how it ends.

Without steps nothing is recorded, and who trains for days should not learn that at the end.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from os import _exit  # scripts get another
from pathlib import Path
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
from recompute_scan.record.launch.launcher import rank_facts, wait_for_ranks
from recompute_scan.record.patches import Patches
from recompute_scan.record.phase import Phase
from recompute_scan.record.steps import StepCounter, in_backward
from recompute_scan.record.watchdog import HUNG
from recompute_scan.run_info import RunInfo, write_run_info

# Streams of a script that has left by `os._exit`: who is deleted is flushed.
_DROPPED: list[Any] = []
# More than most scripts have micro-batches in a step.
_PASSES = 50


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
        if self._counter.steps or self._passes >= _PASSES:
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


def how_it_failed(outcome: Exit) -> str:
    """How a script ended whose exit status is not 0, one sentence."""
    if outcome.ending == "raised":
        error = (outcome.error or "an exception").rstrip(".")
        return f"The script raised {error}."
    if outcome.ending == "interrupted":
        return "The script was interrupted."
    if outcome.ending == "killed":
        return "The process ended without a word."
    if outcome.ending == "hung":
        return "The script made no progress and was ended."
    return f"The script ended with exit status {outcome.exit_status}."


def drop_buffers() -> None:
    """Write no more of what the script has printed than it has flushed, but let us print."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        _DROPPED.append(getattr(sys, name))
        stream = None
        with suppress(OSError):
            stream = os.fdopen(os.dup(number), "w", encoding="utf-8", errors="replace")
        setattr(sys, name, stream)


def leave_hanging(
    folder: Path, info: RunInfo, patience_s: float, on_hang: Callable[[RunInfo], None]
) -> None:
    """End this process, which hangs, once the run record is written and the others' are there."""
    try:
        write_run_info(folder, info)
        # The first process that ends makes a launcher end the others.
        wait_for_ranks(folder, info.world_size, patience_s)
        on_hang(info)
    finally:
        leave_now(HUNG)


def leave_now(status: int) -> None:
    """End this process with this status, and no more than what is printed so far."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    _exit(status)


def tell_of_exec(patches: Patches, guard: Guard, folder: Path, so_far: Callable[[], None]) -> None:
    """Have it said when the script makes this process another program's, which no report follows.

    Args:
        patches: Puts :mod:`os` back.
        guard: What is between the script and this.
        folder: The run's folder.
        so_far: Writes what is recorded until then.
    """
    process = os.getpid()

    def tell() -> None:
        so_far()
        then = ""
        if any(folder.glob("trace-rank*")):
            then = f"\nThen: recompute-scan analyze {folder}"
        print(
            "recompute-scan: the script runs another program in place of its own process, and that "
            f"one is not recorded{then}",
            file=sys.__stderr__,
            flush=True,
        )

    def replaced(call: Call, *args: Any, **kwargs: Any) -> Any:
        if os.getpid() == process:
            guard.run(tell, otherwise=None)
        return call(*args, **kwargs)

    # All others of `os` come down to these two.
    for name in ("execv", "execve"):
        patches.replace(os, name, guard.around(getattr(os, name), replaced))


def leave_groups() -> None:
    """End the process groups that a stopped script has left open."""
    gc.collect()  # data-loader workers end with the script's frames, which are gone by now
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
