"""How a process under observation ends: what is said of it, and the ways out of it."""

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

from recompute_scan.record.execute import Exit
from recompute_scan.record.guard import Call, Guard
from recompute_scan.record.launch.launcher import wait_for_ranks
from recompute_scan.record.patches import Patches
from recompute_scan.record.watchdog import HUNG
from recompute_scan.run_info import RunInfo, write_run_info

# Streams of a script that has left by `os._exit`: who is deleted is flushed.
_DROPPED: list[Any] = []


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
