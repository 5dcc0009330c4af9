"""One process under observation.

Before the script runs it is seen whether the checkpoints of this torch are caught. What is replaced
in torch are private names. A version that keeps such a name and calls another would leave its
checkpoints without annotations, and annotations that are missing tell a false story: of switches
that do nothing, and of recompute that nobody asked for. Where a kind is not caught nothing is
marked at all, and the trace is read as any other is.

So torch is asked for one checkpoint of each kind, which ends where ours would begin: no operator
runs, no random number is drawn, no thread is started, and no device is looked for.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from os import _exit
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from msgspec import Struct
from msgspec.structs import replace
from torch import nn

from recompute_scan.crash import RankEnd
from recompute_scan.diagnose.checkpoint_errors import NO_INPUT_GRAD
from recompute_scan.events import (
    AnyEvent,
    EventStream,
    PhaseBegun,
    ProgressTold,
    ScriptEnded,
    StepEnded,
    WarningTold,
)
from recompute_scan.record.arrange import Arranging
from recompute_scan.record.bypass import Alternation, Bypass, PlainFunctions
from recompute_scan.record.checkpoint_calls import Probe
from recompute_scan.record.execute import Exit, StopRecording
from recompute_scan.record.isolation import Call, Guard, Patches, after_import, in_forked_processes
from recompute_scan.record.launch import rank_facts, receive, send, wait_for_ranks
from recompute_scan.record.measure import Gauges
from recompute_scan.record.options import RunOptions, cannot_write, make_run_record
from recompute_scan.record.origins import (
    WRAPPER_MODULE,
    generator_function,
    reentrant_function,
    replace_generator,
)
from recompute_scan.record.profiler import CompiledGraphs
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
from recompute_scan.record.torch_versions import inputs
from recompute_scan.record.watchdog import HUNG, Watchdog, end_of
from recompute_scan.result.run_record import WORD, RunInfo, write_run_info, write_so_far

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

    def progress(self, text: str) -> None:
        """What goes on, in words."""
        self._tell(ProgressTold(text=text))

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
    error = (outcome.error or "an exception").rstrip(".")
    return {
        "raised": f"The script raised {error}.",
        "interrupted": "The script was interrupted.",
        "terminated": "The script was ended by SIGTERM.",
        "killed": "The process ended without a word.",
        "hung": "The script made no progress and was ended.",
    }.get(outcome.ending, f"The script ended with exit status {outcome.exit_status}.")


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


Checkpoint = Callable[[object], Any]


class _Caught(BaseException):
    """The checkpoint has come to where it is caught."""


def install_self_test(probe: Probe) -> None:
    """Install the probe if this torch's checkpoints are caught; else say so in its warnings.

    FSDP's wrapper is tried once the script has imported it.
    """

    def wrapper_imported(module: ModuleType) -> None:
        with probe.aside():
            missed = uncaught(_wrappers(module))
        if missed:
            _leave_out(probe, missed)

    if missed := uncaught(_direct()):
        _leave_out(probe, missed)
        return
    probe.install()
    probe.at_removal(after_import(WRAPPER_MODULE, wrapper_imported))


def uncaught(kinds: dict[str, Checkpoint]) -> tuple[str, ...]:
    """Which of these kinds of checkpoint do not come to where they are caught.

    None, where a profiler of the script's runs: it would see the attempt.

    Args:
        kinds: By name, what calls a checkpoint with the argument that it gets.
    """
    recording = getattr(torch._C._autograd, "_profiler_enabled", None)
    if recording is not None and recording():
        return ()
    return tuple(name for name, checkpoint in kinds.items() if not _is_caught(checkpoint))


def _is_caught(checkpoint: Checkpoint) -> bool:
    ours = object()
    patches = Patches()
    try:
        _wait_for(ours, patches)
        checkpoint(ours)
    except _Caught:
        return True
    except Exception:  # what it wants is not what it is given here, nor what the hooks expect
        return False
    finally:
        patches.undo()
    return False


def _wait_for(ours: object, patches: Patches) -> None:
    """Stop the checkpoint that has this argument; those of other threads pass."""
    function, generator = reentrant_function(), generator_function()
    forward = getattr(function, "forward", None)
    if forward is not None:

        @functools.wraps(forward)
        def watched_forward(ctx: Any, *args: Any) -> Any:
            if any(arg is ours for arg in args) and any(map(callable, args)):
                raise _Caught
            return forward(ctx, *args)

        patches.replace(function, "forward", staticmethod(watched_forward))
    if generator is not None:

        @functools.wraps(generator)
        def watched_generator(function: Any, *args: Any, **kwargs: Any) -> Any:
            if any(arg is ours for arg in inputs(args)) and callable(function):
                raise _Caught
            return generator(function, *args, **kwargs)

        replace_generator(watched_generator, patches)


def _leave_out(probe: Probe, missed: tuple[str, ...]) -> None:
    probe.leave_out(
        f"In this version of torch ({torch.__version__}) checkpoints of this kind cannot be seen "
        f"when they are called: {', '.join(missed)}. So none bears an annotation: what runs again "
        "is read off the operators, and the call sites are not known."
    )


def _direct() -> dict[str, Checkpoint]:
    function = _without_compiler(torch_checkpoint.checkpoint)
    return {
        "reentrant": lambda x: function(_nothing, x, use_reentrant=True),
        "non-reentrant": lambda x: function(_nothing, x, use_reentrant=False),
    }


def _wrappers(module: ModuleType) -> dict[str, Checkpoint]:
    return {
        f"FSDP's checkpoint_wrapper, {one.name}": functools.partial(_wrapped, module, one)
        for one in module.CheckpointImpl
    }


def _wrapped(module: ModuleType, implementation: object, x: object) -> None:
    # The class: the function warns of the reentrant kind in 2.6, and the script did not ask.
    wrapper = module.CheckpointWrapper(nn.Identity(), implementation)
    asked = wrapper.checkpoint_fn
    if not str(_without_compiler(asked.func).__module__).startswith("torch."):
        raise _Caught  # the script's own is in torch's place, and is not ours to call
    wrapper.checkpoint_fn = functools.partial(
        _without_compiler(asked.func), *asked.args, **asked.keywords
    )
    wrapper.forward(x)  # a call would run the hooks that the script has for all modules


def _nothing(x: object) -> object:
    return x


def _without_compiler(function: Any) -> Any:
    """The function below the decorator that imports the compiler in order to keep it out."""
    return inspect.unwrap(function)


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
    on_exit: Callable[[RunInfo], None] | None = None,
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
        on_hang: As for :func:`recompute_scan.record.children.record`.
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
    guard, exits = guard or Guard(), on_exit or (lambda _: None)
    _forget_in_forked_processes()
    plan = options.plan
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
            exits(conclude(Exit("stopped", 0), waits=True))
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
        counting=None if options.is_special else probe.comparison,
        tell=events.progress,
        logs=not options.is_special,
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

    def terminated(at_step: bool) -> None:
        drop_buffers()  # as the signal does
        if at_step:
            close()
        else:
            recorder.abandon()
        exits(conclude(Exit("terminated", TERMINATED)))

    termination = Termination(lambda: recorder.kept.phase is Phase.TRACE, terminated)
    boundaries = _Boundaries(
        *(guard, recorder, probe, graphs, alternation, gauges, stopping, termination),
        keeps_probe=bypassing,
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
        ends_with = [
            termination.remove,
            watchdog.stop,
            hooks.remove,
            recorder.finish,
            recorder.others.remove,
        ]
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
        if rehearsing is not None:
            failed = bool(outcome.exit_status)
            guard.run(lambda: rehearsing.write(folder, info.rank, failed=failed), otherwise=None)
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
        termination.begin_to_end()
        try:
            drop_buffers()  # as `os._exit` does
            if status:
                failed(SystemExit(status))
            close()
            exits(conclude(Exit("exited", status & 0xFF)))
        finally:
            leave_now(status)

    def idles() -> bool:
        if is_left():
            stopping.begin()
        return stopping.begun or waits()

    process = os.getpid()
    patches = Patches()
    watchdog = Watchdog(folder, options.timeout_s, lambda: counter.steps, hung, idles, guard)
    takes_out = [
        termination.remove,
        hooks.remove,
        recorder.others.remove,
        bypass.remove,
        probe.remove,
        patches.undo,
    ]
    takes_out += [graphs.remove, unstepped.remove, *([gauges.remove] if gauges is not None else [])]
    active = process, [*takes_out, watchdog.forget, removes]
    _ACTIVE.append(active)
    reported_here = on_exit is not None and rank_facts().world_size == 1
    installs = [
        stopping.install,
        lambda: termination.install(alone=reported_here),
        lambda: events.boundary(recorder.kept.phase, 0, recorder.ranks.rank),
        unstepped.install,
        graphs.install,
        lambda: install_self_test(probe),
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
            termination.begin_to_end()
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
    termination: Termination
    keeps_probe: bool

    def restart(self) -> None:
        self.guard.run(self.recorder.restart, otherwise=None)

    def boundary(self) -> None:
        self.termination.hold()
        try:
            self.guard.run(self._boundary, otherwise=None)
            self.termination.at_step()
        except StopRecording:
            self.guard.run(self.stopping.at_step, otherwise=None)
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
