"""One process under observation, from before its script begins until its run record is written."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from os import _exit
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from recompute_scan.crash import RankEnd
from recompute_scan.events import ScriptEnded, TrainingEvents
from recompute_scan.record.arrange import Arranging
from recompute_scan.record.bypass import Alternation, Bypass, PlainFunctions
from recompute_scan.record.checkpoint_calls import install_self_test
from recompute_scan.record.execute import Exit, StopRecording, as_before
from recompute_scan.record.isolation import Call, Guard, Patches, in_forked_processes
from recompute_scan.record.launch import (
    has_process_group,
    rank_facts,
    receive,
    send,
    wait_for_ranks,
)
from recompute_scan.record.measure import Gauges
from recompute_scan.record.options import RunOptions, cannot_write, make_run_record
from recompute_scan.record.recorder import Phase, Recorder
from recompute_scan.record.rehearsal import Rehearsing
from recompute_scan.record.shutdown import (
    TERMINATED,
    Stopping,
    Termination,
    drop_buffers,
    leave_now,
    see_that_it_ends,
)
from recompute_scan.record.shutdown import leave as leave_with_children
from recompute_scan.record.steps import StepCounter, StepHooks, in_backward
from recompute_scan.record.watchdog import HUNG, Watchdog, end_of
from recompute_scan.result.run_record import WORD, RunInfo, write_run_info, write_so_far

# More than most scripts have micro-batches in a step.
_PASSES = 50
# The exit status that a shell gives for a process that was killed.
KILLED = 137
# The sessions under way, each with its process: a forked process inherits its parent's.
_ACTIVE: list[tuple[int, Session]] = []


class Unstepped:
    """Counts backward passes until the first step, and warns where there is none for long."""

    def __init__(self, counter: StepCounter, guard: Guard) -> None:
        self._counter = counter
        self._guard = guard
        self._passes = 0
        self._over = False
        self._patches = Patches()

    def install(self) -> None:
        self._patches.wrap(self._guard, torch.autograd, "backward", self._backward)

    def remove(self) -> None:
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
                self._warn()
        return result

    @as_before()
    def _warn(self) -> None:
        print(
            f"recompute-scan: {self._passes} backward passes, and no step of a torch.optim "
            "optimizer so far: without steps nothing is recorded.\ntry: call "
            "recompute_scan.step() at the end of each step",
            file=sys.stderr,
            flush=True,
        )


class Host:
    """The program that runs a session; this one is a process that the script has started.

    Attributes:
        reports: Whether it reports in this process, also where the script leaves at once.
    """

    reports = False

    def left(self, info: RunInfo) -> None:
        """This process is about to end, and its callers' code does not run any more."""

    def keeps(self, info: RunInfo) -> bool:
        """Whether to write this run record."""
        return trained(info)

    def waits(self) -> bool:
        """Whether the program may make no progress now, because other processes work for it."""
        return False

    def is_left(self) -> bool:
        """Whether those have been stopped, and nothing more comes from them."""
        return False

    def remove(self) -> None:
        """Undo in this process, which the script has forked, what the host has replaced."""


def trained(info: RunInfo) -> bool:
    """Whether this process is one that trains; the report leaves out all others."""
    return info.world_size > 1 or info.warmup_steps > 0 or info.trace is not None


class Session:
    """Records a program in this process.

    Traces are written as soon as they are recorded, and with each of them the run record so far,
    which serves as the run record where the process is killed.

    The folder is absolute: the script may change the current directory.
    """

    def __init__(self, options: RunOptions, folder: Path, host: Host, guard: Guard) -> None:
        self._options, self._folder, self._host, self._guard = options, folder, host, guard
        self._process = os.getpid()
        self._end: RankEnd | None = None
        self._patches = Patches()
        self._gauges = Gauges(guard) if options.measure else None
        events = guard.run(partial(TrainingEvents, options.events), otherwise=None)
        self._events = events or TrainingEvents("")
        recorder = self._recorder = Recorder(
            options.plan,
            folder,
            guard,
            device=options.device,
            keep_going=options.keep_going,
            recording_ranks=options.ranks,
            gauges=self._gauges,
            on_kept=self._write_so_far,
            events=self._events,
            reports=not options.is_special,
            quiet=options.quiet,
        )
        self._probe, self._counter, self._graphs = recorder.probe, recorder.counter, recorder.graphs
        self._switch_checkpoints()
        self._stopping = Stopping(lambda: recorder.ranks.world_size == 1, self._leave_waiting)
        self._termination = Termination(
            lambda: recorder.kept.phase is Phase.TRACE, self._terminated
        )
        self._hooks = StepHooks(self._counter, self.boundary, self.restart, guard)
        self._unstepped = Unstepped(self._counter, guard)
        self._watchdog = Watchdog(
            folder, options.timeout_s, lambda: self._counter.steps, self._hung, self._idles, guard
        )

    def _switch_checkpoints(self) -> None:
        options, guard = self._options, self._guard
        everything = options.without_checkpointing
        self._bypassing = bool(options.removals or options.arms) or everything
        self._rehearsing: Rehearsing | None = None
        self._alternation: Alternation | Rehearsing | None = None
        self._plain: PlainFunctions | None = None
        if options.arms:
            arranging = Arranging(guard)
            self._bypass: Bypass = arranging
            self._rehearsing = Rehearsing(arranging, self._recorder, options.arms)
            self._alternation = self._rehearsing
        else:
            probe = None if everything else self._probe
            self._bypass = Bypass(guard, options.removals, probe)
        if everything:
            self._plain = PlainFunctions(self._bypass, guard)
        if options.switching:
            self._alternation = Alternation(self._bypass, self._recorder, options.warmup)
        wanted = self._bypass if self._bypassing else None
        self._changes = [one for one in (wanted, self._plain, self._gauges) if one is not None]

    def run(self, program: Callable[[Callable[[BaseException], None]], Exit]) -> RunInfo:
        """This process's run record of the program, which runs now.

        Args:
            program: Runs the script; gets a function to call with an exception that ends it.

        Raises:
            UsageError: The run record cannot be written (``E206``).
            SystemExit: In a process that the script forked and that has come to the program's end:
                it ends as it would without us.
        """
        _forget_in_forked_processes()
        _ACTIVE.append((self._process, self))
        for install in self._installs():
            self._guard.run(install, otherwise=None)
        outcome: Exit | None = None
        try:
            outcome = program(self._failed)
        finally:
            if os.getpid() == self._process:
                self._watchdog.let_leave()
                self._termination.begin_to_end()
                self._stopping.remove()
                self._close()
                if outcome is None:  # there was no script
                    self._guard.run(self._watchdog.disarm, otherwise=None)
        if os.getpid() != self._process:
            raise SystemExit(outcome.exit_status)
        if self._stopping.begun:  # the script has not caused any end that followed, in any thread
            self._end = None
            outcome = Exit("stopped", 0)
        return self._conclude(outcome)

    def _installs(self) -> list[Callable[[], object]]:
        recorder, ranks = self._recorder, rank_facts()
        alone = self._host.reports and ranks.world_size == 1
        return [
            self._stopping.install,
            lambda: self._termination.install(alone=alone),
            lambda: self._events.boundary(recorder.kept.phase.event, 0, recorder.ranks.rank),
            self._unstepped.install,
            self._graphs.install,
            lambda: install_self_test(self._probe),
            *(one.install for one in self._changes),
            recorder.others.install,
            self._hooks.install,
            lambda: self._patches.replace(os, "_exit", self._leave),
            self._watchdog.start,
            self._watch_exec,
            # Of a rank that is killed before its first trace, too.
            *([self._write_so_far] if ranks.world_size > 1 else []),
        ]

    def _removals(self) -> list[Callable[[], object]]:
        return [
            self._recorder.others.remove,
            *(one.remove for one in reversed(self._changes)),
            self._graphs.remove,
            self._probe.remove,
            self._unstepped.remove,
            self._patches.undo,
        ]

    def forget(self) -> None:
        """In a forked process: take out everything, since it observes the parent."""
        for remove in (
            self._termination.remove,
            self._hooks.remove,
            self._recorder.forget,
            *self._removals(),
            self._watchdog.forget,
            self._host.remove,
        ):
            with suppress(Exception):
                remove()

    def _close(self) -> None:
        for one in (
            self._termination.remove,
            self._watchdog.stop,
            self._hooks.remove,
            self._recorder.finish,
            *self._removals(),
        ):
            self._guard.run(one, otherwise=None)
        if (self._process, self) in _ACTIVE:
            _ACTIVE.remove((self._process, self))

    # Step boundaries.

    def restart(self) -> None:
        self._guard.run(self._recorder.restart, otherwise=None)

    def boundary(self) -> None:
        """A step has ended.

        Raises:
            SystemExit: Everything is recorded, and the script need not go on.
        """
        self._termination.hold()
        try:
            self._guard.run(self._boundary, otherwise=None)
            self._termination.at_step()
        except StopRecording:
            self._guard.run(self._stopping.at_step, otherwise=None)
            if self._stopping.here:
                raise
        else:
            return
        raise SystemExit(0)  # Python prints nothing for a thread that ends so, but for subclasses

    def _boundary(self) -> None:
        """Look at the gradients, then let the recorder and the switching of checkpoints go on.

        The probe goes with the last recorded step, unless checkpoints are to stay out.
        """
        recorder = self._recorder
        self._watchdog.keep_stacks_when_terminated()
        if not recorder.done:
            self._probe.look_at_gradients()
        if self._gauges is not None:
            self._gauges.look_at_gradients()
        if self._alternation is not None:
            self._alternation.settle()
        recorder.boundary()
        if self._alternation is not None:
            self._alternation.next()
        if recorder.done:
            self._graphs.remove()
            if not self._bypassing:
                self._probe.remove()
                recorder.others.remove()

    # Endings.

    @as_before()
    def _failed(self, error: BaseException) -> None:
        """The script ends with this error: keep what can be known while its objects live."""
        if os.getpid() == self._process:
            self._watchdog.let_leave()
            end = partial(end_of, error, self._counter.steps, self._probe)
            self._end = self._guard.run(end, otherwise=self._end)

    @as_before()
    def _leave_waiting(self) -> None:
        """The script was stopped, and its main thread waits for good."""
        try:
            self._host.left(self._conclude(Exit("stopped", 0), waits=True))
        finally:
            leave_with_children(0)

    @as_before()
    def _terminated(self, at_step: bool) -> None:
        drop_buffers()  # as the signal does
        if at_step:
            self._close()
        else:
            self._recorder.abandon()
        self._host.left(self._conclude(Exit("terminated", TERMINATED)))

    @as_before()
    def _leave(self, status: int) -> None:
        """``os._exit``, called by the script."""
        if os.getpid() != self._process:
            _exit(status)
        self._termination.begin_to_end()
        try:
            drop_buffers()  # as `os._exit` does
            if status:
                self._failed(SystemExit(status))
            self._close()
            self._host.left(self._conclude(Exit("exited", status & 0xFF)))
        finally:
            leave_now(status)

    @as_before()
    def _hung(self, end: RankEnd) -> None:
        """The script makes no progress: end this process, once the other ranks have written."""
        self._recorder.abandon()
        outcome = Exit("hung", HUNG)
        info = self._run_record(outcome, replace(end, regions=dict(self._probe.entered)))
        self._tell_ended(outcome, info)
        try:
            write_run_info(self._folder, info)
            # The first process that ends makes a launcher end the others.
            wait_for_ranks(self._folder, info.world_size, self._watchdog.patience_s)
            self._host.left(info)
        finally:
            leave_now(HUNG)

    def _idles(self) -> bool:
        if self._host.is_left():
            self._stopping.begin()
        return self._stopping.begun or self._host.waits()

    def _watch_exec(self) -> None:
        """Warn when the script replaces this process by another program, which is not recorded."""

        @as_before()
        def warn() -> None:
            self._write_so_far()
            then = ""
            if any(self._folder.glob("trace-rank*")):
                then = f"\nThen: recompute-scan analyze {self._folder}"
            print(
                "recompute-scan: the script replaces its process with another program, which is "
                f"not recorded{then}",
                file=sys.__stderr__,
                flush=True,
            )

        def replaced(call: Call, *args: Any, **kwargs: Any) -> Any:
            if os.getpid() == self._process:
                self._guard.run(warn, otherwise=None)
            return call(*args, **kwargs)

        # All others of `os` call one of these two.
        for name in ("execv", "execve"):
            self._patches.wrap(self._guard, os, name, replaced)

    # Run records.

    def _run_record(self, outcome: Exit, end: RankEnd | None) -> RunInfo:
        self._graphs.write()
        options = self._options
        return make_run_record(
            self._recorder,
            f"-m {options.target}" if options.is_module else options.target,
            failure=how_it_failed(outcome) if outcome.exit_status else None,
            status=outcome.exit_status,
            end=end,
        )

    @as_before()
    def _write_so_far(self) -> None:
        end = RankEnd(rank=None, ending="killed", steps=self._counter.steps)
        info = self._run_record(Exit("killed", KILLED), end)
        with suppress(OSError):
            write_so_far(self._folder, info)

    def _tell_ended(self, outcome: Exit, info: RunInfo) -> None:
        if outcome.ending == "killed":
            return
        ended = ScriptEnded(
            ending=outcome.ending,
            exit_status=outcome.exit_status,
            error=outcome.error,
            steps=self._counter.steps,
        )
        warnings = (*info.warnings, *filter(None, [info.bug]))
        self._guard.run(lambda: self._events.ended(ended, info.rank, warnings), otherwise=None)

    @as_before()
    def _conclude(self, outcome: Exit, *, waits: bool = False) -> RunInfo:
        try:
            return self._conclude_armed(outcome, waits=waits)
        finally:
            self._guard.run(self._watchdog.disarm, otherwise=None)

    def _conclude_armed(self, outcome: Exit, *, waits: bool) -> RunInfo:
        folder, plain = self._folder, self._plain
        info = self._run_record(outcome, self._end)
        if self._gauges is not None:
            names = plain.names if plain else ()
            info = replace(info, measured=self._gauges.measurements(self._bypass.calls, names))
            if plain is None or plain.whole:
                self._gauges.write_gradients(folder, info.rank)
        if (rehearsing := self._rehearsing) is not None:
            failed = bool(outcome.exit_status)
            self._guard.run(
                lambda: rehearsing.write(folder, info.rank, failed=failed), otherwise=None
            )
        if outcome.ending == "stopped" and not waits:
            gc.collect()  # data-loader workers end with the script's frames, which are gone by now
            if has_process_group():
                torch.distributed.destroy_process_group()
            see_that_it_ends()
        store = self._recorder.membership.store
        if store is not None and outcome.ending in ("stopped", "finished"):
            if info.rank:
                send(folder, store, info)
            else:
                warnings = (*info.warnings, *receive(folder, store, info.world_size))
                info = replace(info, warnings=warnings)
        if info.rank == 0:
            (folder / WORD).unlink(missing_ok=True)
        self._tell_ended(outcome, info)
        if self._host.keeps(info):
            try:
                write_run_info(folder, info)
            except OSError as error:
                raise cannot_write(folder, error) from None
        return info


def how_it_failed(outcome: Exit) -> str:
    """How a script ended that has an exit status other than 0, one sentence."""
    error = (outcome.error or "an exception").rstrip(".")
    return {
        "raised": f"The script raised {error}.",
        "interrupted": "The script was interrupted.",
        "terminated": "The script was ended by SIGTERM.",
        "killed": "The process ended without a message.",
        "hung": "The script made no progress and was ended.",
    }.get(outcome.ending, f"The script ended with exit status {outcome.exit_status}.")


def forget_parent() -> None:
    """In a forked process: take out what its parent had installed, which observes the parent."""
    while _ACTIVE and _ACTIVE[-1][0] != os.getpid():
        _ACTIVE.pop()[1].forget()


@functools.cache
def _forget_in_forked_processes() -> None:
    in_forked_processes(forget_parent)
