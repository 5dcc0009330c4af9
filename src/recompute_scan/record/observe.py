"""One process under observation: step hooks, checkpoint probe, watchdog, and its run record."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from os import _exit  # scripts get another
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.crash import RankEnd
from recompute_scan.diagnose.reentrant import NO_INPUT_GRAD
from recompute_scan.record import selftest
from recompute_scan.record.arrange.arranging import Arranging
from recompute_scan.record.arrange.rehearsing import Rehearsing
from recompute_scan.record.compiled_graphs import CompiledGraphs
from recompute_scan.record.course import (
    TrainingEvents,
    Unstepped,
    drop_buffers,
    how_it_failed,
    leave_groups,
    leave_hanging,
    leave_now,
    tell_of_exec,
)
from recompute_scan.record.execute import Exit, StopRecording
from recompute_scan.record.guard import Guard
from recompute_scan.record.launch.collect import receive, send
from recompute_scan.record.launch.forks import in_forked_processes
from recompute_scan.record.launch.launcher import rank_facts
from recompute_scan.record.patches import Patches
from recompute_scan.record.postmortem import end_of
from recompute_scan.record.probe import Probe
from recompute_scan.record.recorder import Recorder
from recompute_scan.record.run_folder import cannot_write
from recompute_scan.record.run_options import RunOptions
from recompute_scan.record.run_record import make_run_record
from recompute_scan.record.scope import Plan
from recompute_scan.record.steps import StepCounter, StepHooks
from recompute_scan.record.stopping import Stopping, see_that_it_ends
from recompute_scan.record.stopping import leave as leave_with_children
from recompute_scan.record.verify.bypass import Alternation, Bypass, PlainFunctions
from recompute_scan.record.verify.gauges import Gauges
from recompute_scan.record.watchdog import HUNG, Watchdog
from recompute_scan.run_info import WORD, RunInfo, write_run_info, write_so_far

# What a shell says of a process that was killed.
KILLED = 137
# What observes now, with the process that it belongs to: a forked one inherits its parent's.
_ACTIVE: list[tuple[int, list[Callable[[], None]]]] = []


def observe(
    options: RunOptions,
    folder: Path,
    program: Callable[[Callable[[BaseException], None]], Exit],
    *,
    on_hang: Callable[[RunInfo], None] = lambda _: None,
    on_exit: Callable[[RunInfo], None] = lambda _: None,
    keep: Callable[[RunInfo], bool] = lambda _: True,
    waits: Callable[[], bool] = lambda: False,
    is_left: Callable[[], bool] = lambda: False,
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
        waits: Whether the program may make no progress now, because others work for it.
        is_left: Whether those have been stopped, and nothing more comes from them.
        guard: What is between the script and what is installed around this.
        removes: What takes that out again, in a process that the script forks.

    Raises:
        UsageError: The run record cannot be written (``E206``).
        SystemExit: In a process that the script forked and that has come to the program's end: it
            ends as it would without us.
    """
    guard = guard or Guard()
    _forget_in_forked_processes()
    plan = Plan(
        warmup=options.warmup,
        timing=options.timing_steps,
        steps=options.steps,
        fidelity=options.fidelity,
    )
    probe = Probe(Path.cwd(), guard)
    counter = StepCounter()
    gauges = Gauges(guard) if options.measure else None
    events = guard.run(partial(TrainingEvents, options.events), otherwise=None)
    events = events or TrainingEvents("")

    target = f"-m {options.target}" if options.is_module else options.target

    def run_record(outcome: Exit, end: RankEnd | None) -> RunInfo:
        graphs.write()
        failure = how_it_failed(outcome) if outcome.exit_status else None
        return make_run_record(
            recorder, probe, plan, target, failure=failure, status=outcome.exit_status, end=end
        )

    def so_far() -> None:
        end = RankEnd(rank=None, ending="killed", steps=counter.steps)
        info = run_record(Exit("killed", KILLED), end)
        with suppress(OSError):
            write_so_far(folder, info)

    def leave_waiting() -> None:
        try:
            on_exit(conclude(Exit("stopped", 0), waits=True))
        finally:
            leave_with_children(0)

    recorder = Recorder(
        plan,
        folder,
        device=options.device,
        keep_going=options.keep_going,
        counter=counter,
        begin_annotating=probe.begin,
        comparison=probe.comparison,
        policies=probe.policies,
        memory=gauges.memory if gauges else None,
        recording_ranks=options.ranks,
        on_kept=so_far,
        guard=guard,
        follow=events.boundary,
    )
    graphs = CompiledGraphs(folder, lambda: recorder.ranks.rank, guard)
    guard.on_failure, guard.settle = recorder.give_up, recorder.settle
    everything = options.without_checkpointing
    bypassing = bool(options.removals or options.arms) or everything
    arranging = Arranging(probe, guard) if options.arms else None
    bypass = arranging or Bypass(probe, options.removals, everything=everything, guard=guard)
    plain = PlainFunctions(bypass, guard) if everything else None
    rehearsing = Rehearsing(arranging, recorder, options.arms) if arranging else None
    alternation: Alternation | Rehearsing | None = rehearsing
    if options.switching:
        alternation = Alternation(bypass, recorder, plan.warmup)
    stopping = Stopping(lambda: recorder.ranks.world_size == 1, leave_waiting)
    boundaries = _Boundaries(
        guard, recorder, probe, graphs, alternation, gauges, stopping, keeps_probe=bypassing
    )
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
        outcome = Exit("hung", HUNG)
        info = run_record(outcome, end)
        guard.run(lambda: events.ended(outcome, info, counter.steps), otherwise=None)
        leave_hanging(folder, info, watchdog.patience_s, on_hang)

    def close() -> None:
        ends_with = [watchdog.stop, hooks.remove, recorder.finish, recorder.others.remove]
        ends_with += [gauges.remove] if gauges is not None else []
        for one in (
            *ends_with,
            graphs.remove,
            bypass.remove,
            *([plain.remove] if plain else []),
            probe.remove,
            unstepped.remove,
            patches.undo,
        ):
            guard.run(one, otherwise=None)
        if active in _ACTIVE:
            _ACTIVE.remove(active)

    def conclude(outcome: Exit, *, waits: bool = False) -> RunInfo:
        try:
            return conclude_armed(outcome, waits=waits)
        finally:
            guard.run(watchdog.disarm, otherwise=None)

    def conclude_armed(outcome: Exit, *, waits: bool) -> RunInfo:
        info = run_record(outcome, ends[0] if ends else None)
        if gauges is not None:
            info = replace(
                info, measured=gauges.measurements(bypass.calls, plain.names if plain else ())
            )
            if plain is None or plain.whole:
                gauges.gradients.write(folder, info.rank)
        if rehearsing is not None and not outcome.exit_status:
            guard.run(lambda: rehearsing.write(folder, info.rank), otherwise=None)
        if outcome.ending == "stopped" and not waits:
            leave_groups()
            see_that_it_ends()
        if recorder.store is not None and outcome.ending in ("stopped", "finished"):
            info = _bring_together(folder, recorder.store, info)
        if info.rank == 0:
            (folder / WORD).unlink(missing_ok=True)
        guard.run(lambda: events.ended(outcome, info, counter.steps), otherwise=None)
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
            drop_buffers()  # as `os._exit` does
            if status:
                failed(SystemExit(status))
            close()
            on_exit(conclude(Exit("exited", status & 0xFF)))
        finally:
            leave_now(status)

    def idles() -> bool:
        if is_left():
            stopping.begin()
        return stopping.begun or waits()

    process = os.getpid()
    patches = Patches()
    watchdog = Watchdog(folder, options.timeout_s, lambda: counter.steps, hung, idles, guard)
    takes_out = [hooks.remove, recorder.others.remove, bypass.remove, probe.remove, patches.undo]
    takes_out += [graphs.remove, unstepped.remove, *([gauges.remove] if gauges is not None else [])]
    active = process, [*takes_out, watchdog.forget, removes]
    _ACTIVE.append(active)
    installs = [
        stopping.install,
        lambda: events.boundary(recorder.kept.phase, 0, recorder.ranks.rank),
        unstepped.install,
        graphs.install,
        lambda: selftest.install(probe),
        *([bypass.install] if bypassing else []),
        *([plain.install] if plain else []),
    ]
    installs += [gauges.install] if gauges is not None else []
    installs += [recorder.others.install, hooks.install]
    installs += [lambda: patches.replace(os, "_exit", leave), watchdog.start]
    installs.append(lambda: tell_of_exec(patches, guard, folder, so_far))
    if rank_facts().world_size > 1:
        installs.append(so_far)  # of a rank that is killed before its first trace, too
    for install in installs:
        guard.run(install, otherwise=None)
    outcome: Exit | None = None
    try:
        outcome = program(failed)
    finally:
        if os.getpid() == process:
            watchdog.let_leave()
            stopping.remove()
            close()
            if outcome is None:  # there was no script
                guard.run(watchdog.disarm, otherwise=None)
    if os.getpid() != process:
        raise SystemExit(outcome.exit_status)
    if stopping.begun:  # what came of it, in whichever thread, is not the script's doing
        ends.clear()
        outcome = Exit("stopped", 0)
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


class _Boundaries(Struct, frozen=True):
    """The step boundaries go to the recorder, once the gradients have been looked at, and then to
    what switches checkpoints on and off, where that is wanted.

    With the last recorded step the probe goes, unless checkpoints are to stay out.
    """

    guard: Guard
    recorder: Recorder
    probe: Probe
    graphs: CompiledGraphs
    alternation: Alternation | Rehearsing | None
    gauges: Gauges | None
    stopping: Stopping
    keeps_probe: bool

    def restart(self) -> None:
        self.guard.run(self.recorder.restart, otherwise=None)

    def boundary(self) -> None:
        try:
            self.guard.run(self._boundary, otherwise=None)
        except StopRecording:
            self.guard.run(self.stopping.begin, otherwise=None)
            if self.stopping.here:
                raise
        else:
            return
        raise SystemExit(0)  # Python says nothing of a thread that ends so, and of no subclass

    def _boundary(self) -> None:
        if not self.recorder.done:
            self.probe.look_at_gradients()
        if self.gauges is not None:
            self.gauges.gradients.look()
        if self.alternation is not None:
            self.alternation.settle()
        self.recorder.boundary()
        if self.alternation is not None:
            self.alternation.next()
        if self.recorder.done:
            self.graphs.remove()
        if self.recorder.done and not self.keeps_probe:
            self.probe.remove()
            self.recorder.others.remove()
