"""One process under observation: step hooks, checkpoint probe, watchdog, and its run record."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from os import _exit  # scripts get another
from pathlib import Path
from typing import Any

import torch

from recompute_scan.crash import RankEnd
from recompute_scan.diagnose.reentrant import NO_INPUT_GRAD
from recompute_scan.record import selftest
from recompute_scan.record.execute import Exit
from recompute_scan.record.guard import Guard
from recompute_scan.record.launch.collect import receive, send
from recompute_scan.record.launch.forks import in_forked_processes
from recompute_scan.record.launch.launcher import rank_facts, wait_for_ranks
from recompute_scan.record.patches import Patches
from recompute_scan.record.postmortem import end_of
from recompute_scan.record.probe import Probe
from recompute_scan.record.recorder import Recorder
from recompute_scan.record.run_folder import cannot_write
from recompute_scan.record.run_options import RunOptions
from recompute_scan.record.run_record import make_run_record
from recompute_scan.record.scope import Plan
from recompute_scan.record.steps import StepCounter, StepHooks
from recompute_scan.record.unstepped import Unstepped
from recompute_scan.record.verify.bypass import Alternation, Bypass
from recompute_scan.record.verify.gauges import Gauges
from recompute_scan.record.watchdog import HUNG, Watchdog
from recompute_scan.run_info import WORD, RunInfo, write_run_info, write_so_far

# What a shell says of a process that was killed.
KILLED = 137
# What observes now, with the process that it belongs to: a forked one inherits its parent's.
_ACTIVE: list[tuple[int, list[Callable[[], None]]]] = []
# Streams of a script that has left by `os._exit`: who is deleted is flushed.
_DROPPED: list[Any] = []


def observe(
    options: RunOptions,
    folder: Path,
    program: Callable[[Callable[[BaseException], None]], Exit],
    *,
    on_hang: Callable[[RunInfo], None] = lambda _: None,
    on_exit: Callable[[RunInfo], None] = lambda _: None,
    keep: Callable[[RunInfo], bool] = lambda _: True,
    waits: Callable[[], bool] = lambda: False,
    guard: Guard | None = None,
    removes: Callable[[], None] = lambda: None,
) -> RunInfo:
    """This process's run record of the program, which it runs.

    Traces are written as soon as they are recorded, and with each of them the run record so far,
    which is taken for the run record where the process is killed.

    Args:
        options: How much to record.
        folder: The run's folder, absolute: the script may change the current directory.
        program: Runs the script; gets what to call with an exception that ends it.
        on_hang: As for :func:`recompute_scan.record.launch.runner.record`.
        on_exit: Likewise.
        keep: Whether to write this run record.
        waits: Whether the program may stand still now, because others work for it.
        guard: What stands between the script and what is installed around this.
        removes: What takes that out again, in a process that the script forks.

    Raises:
        UsageError: The run record cannot be written (``E206``).
        SystemExit: In a process that the script forked and that has come to the program's end: it
            ends as it would without us.
    """
    guard = guard or Guard()
    _forget_in_forked_processes()
    plan = Plan(warmup=options.warmup, timing=options.timing_steps, steps=options.steps)
    probe = Probe(Path.cwd(), guard)
    counter = StepCounter()
    gauges = Gauges(guard) if options.measure else None

    target = f"-m {options.target}" if options.is_module else options.target

    def run_record(outcome: Exit, end: RankEnd | None) -> RunInfo:
        failure = _how_it_failed(outcome) if outcome.exit_status else None
        return make_run_record(
            recorder, probe, plan, target, failure=failure, status=outcome.exit_status, end=end
        )

    def so_far() -> None:
        end = RankEnd(rank=None, ending="killed", steps=counter.steps)
        info = run_record(Exit("killed", KILLED), end)
        with suppress(OSError):
            write_so_far(folder, info)

    recorder = Recorder(
        plan,
        folder,
        device=options.device,
        keep_going=options.keep_going,
        counter=counter,
        begin_annotating=probe.begin,
        memory=gauges.memory if gauges else None,
        recording_ranks=options.ranks,
        on_kept=so_far,
        guard=guard,
    )
    guard.on_failure, guard.settle = recorder.give_up, recorder.settle
    everything = options.without_checkpointing
    bypassing = bool(options.removals) or everything
    bypass = Bypass(probe, options.removals, everything=everything, guard=guard)
    alternation = Alternation(bypass, recorder, plan.warmup) if options.switching else None
    boundaries = _Boundaries(recorder, probe, alternation, keeps_probe=bypassing)
    hooks = StepHooks(counter, boundaries, guard)
    unstepped = Unstepped(counter, guard)
    ends: list[RankEnd] = []

    def failed(error: BaseException) -> None:
        if os.getpid() == process:
            watchdog.let_leave()
            guard.run(lambda: keep_end(error), otherwise=None)

    def keep_end(error: BaseException) -> None:
        seen = [NO_INPUT_GRAD] if probe.untrained.suspected else []
        ends.append(end_of(error, counter.steps, seen, probe.entered))

    def hung(end: RankEnd) -> None:
        recorder.abandon()
        end = replace(end, regions=dict(probe.entered))
        info = run_record(Exit("hung", HUNG), end)
        _leave(folder, info, watchdog.patience_s, on_hang)

    def close() -> None:
        ends_with = [watchdog.stop, hooks.remove, recorder.finish, recorder.others.remove]
        ends_with += [gauges.remove] if gauges is not None else []
        for one in (*ends_with, bypass.remove, probe.remove, unstepped.remove, patches.undo):
            guard.run(one, otherwise=None)
        if active in _ACTIVE:
            _ACTIVE.remove(active)

    def conclude(outcome: Exit) -> RunInfo:
        info = run_record(outcome, ends[0] if ends else None)
        if gauges is not None:
            info = replace(info, measured=gauges.measurements(bypass.calls))
        if outcome.ending == "stopped":
            _leave_groups()
        if recorder.store is not None and outcome.ending in ("stopped", "finished"):
            info = _bring_together(folder, recorder.store, info)
        if info.rank == 0:
            (folder / WORD).unlink(missing_ok=True)
        if keep(info):
            try:
                write_run_info(folder, info)
            except OSError as error:
                raise cannot_write(folder, error) from None
        return info

    def leave(status: int) -> None:
        if os.getpid() != process:
            _exit(status)
        try:
            _drop_buffers()  # as `os._exit` does
            if status:
                failed(SystemExit(status))
            close()
            on_exit(conclude(Exit("exited", status & 0xFF)))
        finally:
            _leave_now(status)

    process = os.getpid()
    patches = Patches()
    watchdog = Watchdog(folder, options.timeout_s, lambda: counter.steps, hung, waits, guard)
    takes_out = [hooks.remove, recorder.others.remove, bypass.remove, probe.remove, patches.undo]
    takes_out += [unstepped.remove, *([gauges.remove] if gauges is not None else [])]
    active = process, [*takes_out, watchdog.forget, removes]
    _ACTIVE.append(active)
    installs = [
        unstepped.install,
        lambda: selftest.install(probe),
        *([bypass.install] if bypassing else []),
    ]
    installs += [gauges.install] if gauges is not None else []
    installs += [recorder.others.install, hooks.install]
    installs += [lambda: patches.replace(os, "_exit", leave), watchdog.start]
    if rank_facts().world_size > 1:
        installs.append(so_far)  # of a rank that is killed before its first trace, too
    for install in installs:
        guard.run(install, otherwise=None)
    try:
        outcome = program(failed)
    finally:
        if os.getpid() == process:
            watchdog.let_leave()
            close()
    if os.getpid() != process:
        raise SystemExit(outcome.exit_status)
    return conclude(outcome)


def _bring_together(folder: Path, store: Any, info: RunInfo) -> RunInfo:
    if info.rank:
        send(folder, store, info)
        return info
    return replace(info, warnings=(*info.warnings, *receive(folder, store, info.world_size)))


def forget_parent() -> None:
    """In a forked process: take out what its parent had installed, which observes the parent."""
    while _ACTIVE and _ACTIVE[-1][0] != os.getpid():
        for remove in _ACTIVE.pop()[1]:
            with suppress(Exception):
                remove()


@functools.cache
def _forget_in_forked_processes() -> None:
    in_forked_processes(forget_parent)


def _drop_buffers() -> None:
    """Write no more of what the script has printed than it has flushed, but let us print."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        _DROPPED.append(getattr(sys, name))
        stream = None
        with suppress(OSError):
            stream = os.fdopen(os.dup(number), "w", encoding="utf-8", errors="replace")
        setattr(sys, name, stream)


def _how_it_failed(outcome: Exit) -> str:
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


@dataclass(frozen=True)
class _Boundaries:
    """The step boundaries go to the recorder, once the gradients have been looked at, and then to
    what switches the fix on and off, where that is wanted.

    With the last recorded step the probe goes, unless checkpoints are to stay out.
    """

    recorder: Recorder
    probe: Probe
    alternation: Alternation | None
    keeps_probe: bool

    def restart(self) -> None:
        self.recorder.restart()

    def boundary(self) -> None:
        if not self.recorder.done:
            self.probe.look_at_gradients()
        if self.alternation is not None:
            self.alternation.settle()
        self.recorder.boundary()
        if self.alternation is not None:
            self.alternation.next()
        if self.recorder.done and not self.keeps_probe:
            self.probe.remove()
            self.recorder.others.remove()


def _leave(
    folder: Path, info: RunInfo, patience_s: float, on_hang: Callable[[RunInfo], None]
) -> None:
    """End this process, which hangs, once the run record is written and the others' are there."""
    try:
        write_run_info(folder, info)
        # The first process that ends makes a launcher end the others.
        wait_for_ranks(folder, info.world_size, patience_s)
        on_hang(info)
    finally:
        _leave_now(HUNG)


def _leave_now(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    _exit(status)


def _leave_groups() -> None:
    gc.collect()  # data-loader workers end with the script's frames, which are gone by now
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
