"""Record the user's script, unchanged, in this process.

:func:`record` runs it under the step hooks and the checkpoint probe, and leaves the traces and
this rank's account in the output folder, whatever the script does.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from recompute_scan.crash import RankEnd
from recompute_scan.diagnose.checkpointing import NO_INPUT_GRAD
from recompute_scan.record.account import account_of
from recompute_scan.record.bypass import Bypass, Removal
from recompute_scan.record.chosen import DEFAULT, chosen
from recompute_scan.record.execute import Outcome, run_program
from recompute_scan.record.failure import end_of
from recompute_scan.record.gauges import Gauges
from recompute_scan.record.launch import wait_for_ranks
from recompute_scan.record.plan import Plan
from recompute_scan.record.probe import Probe
from recompute_scan.record.recorder import Recorder
from recompute_scan.record.run_folder import cannot_write, check_device, check_plan, prepare
from recompute_scan.record.steps import StepCounter, StepHooks
from recompute_scan.record.watchdog import HUNG, Watchdog
from recompute_scan.run_info import RunInfo, write_run_info


@dataclass(frozen=True)
class RunOptions:
    """What to run and how much of it to record.

    Attributes:
        target: Path of the script, or name of the module.
        is_module: Whether ``target`` is a module, as with ``python -m``.
        args: The script's own arguments.
        output: Folder for the traces and the account; made when missing.
        steps: Steps profiled without stacks, at least 1; where steps are measured, 0 will do.
        warmup: Steps before anything is recorded, at least 1.
        timing_steps: Steps timed without the profiler; 0 for none.
        device: What to record; ``auto`` records the GPU where the script uses one.
        keep_going: Let the script run to its end after the last recorded step.
        measure: Measure memory and losses too, from seeds that are the same in every run.
        removals: Checkpoints to take out in memory.
        without_checkpointing: Take out every checkpoint.
        timeout_s: Seconds without progress after which a run is ended; 0 for never.
        ranks: The ranks to record, as :func:`recompute_scan.record.chosen.chosen` reads them; the
            others count and time their steps, and stop with them.
    """

    target: str
    is_module: bool
    args: tuple[str, ...]
    output: Path
    steps: int = 5
    warmup: int = 3
    timing_steps: int = 10
    device: Literal["auto", "cpu", "cuda"] = "auto"
    keep_going: bool = False
    measure: bool = False
    removals: tuple[Removal, ...] = ()
    without_checkpointing: bool = False
    timeout_s: float = 0.0
    ranks: str = DEFAULT


def record(options: RunOptions, on_hang: Callable[[RunInfo], None] = lambda _: None) -> RunInfo:
    """This rank's account of the run, as it was also written to ``run-rank<N>.json``.

    Returns normally whatever the script does: its failure is in ``exit_status`` and ``end``. Only
    a script that hangs cannot be returned from: then the account is written, ``on_hang`` is called
    with it in another thread, and the process ends with status 124.

    Raises:
        UsageError: No such script (``E202``) or module (``E203``), impossible step counts
            (``E204``), no GPU although one is asked for (``E205``), an output folder that
            cannot be written (``E206``), or ranks that are none (``E224``).
    """
    chosen(options.ranks, 1)
    plan = Plan(warmup=options.warmup, timing=options.timing_steps, steps=options.steps)
    check_plan(plan, measuring=options.measure)
    check_device(options.device)
    folder = options.output.absolute()  # the script may change the current directory
    prepare(folder)
    probe = Probe(Path.cwd())
    counter = StepCounter()
    gauges = Gauges() if options.measure else None
    recorder = Recorder(
        plan,
        folder,
        device=options.device,
        keep_going=options.keep_going,
        counter=counter,
        begin_marking=probe.begin,
        memory=gauges.memory if gauges else None,
        recording_ranks=options.ranks,
    )
    everything = options.without_checkpointing
    bypassing = bool(options.removals) or everything
    bypass = Bypass(probe, options.removals, everything=everything)
    hooks = StepHooks(counter, _Boundaries(recorder, probe, keeps_probe=bypassing))
    ends: list[RankEnd] = []
    target = f"-m {options.target}" if options.is_module else options.target

    def account(outcome: Outcome, end: RankEnd | None) -> RunInfo:
        failure = _how_it_failed(outcome) if outcome.exit_status else None
        return account_of(
            recorder, probe, plan, target, failure=failure, status=outcome.exit_status, end=end
        )

    def failed(error: BaseException) -> None:
        seen = [NO_INPUT_GRAD] if probe.untrained.suspected else []
        ends.append(end_of(error, counter.steps, seen, probe.entered))

    def hung(end: RankEnd) -> None:
        recorder.abandon()
        end = replace(end, regions=dict(probe.entered))
        info = account(Outcome("hung", HUNG), end)
        _leave(folder, info, watchdog.patience_s, on_hang)

    watchdog = Watchdog(folder, options.timeout_s, lambda: counter.steps, hung)
    probe.install()
    if bypassing:
        bypass.install()
    if gauges is not None:
        gauges.install()
    recorder.others.install()
    hooks.install()
    watchdog.start()
    try:
        outcome = run_program(options.target, options.is_module, options.args, failed)
    finally:
        watchdog.stop()
        hooks.remove()
        recorder.finish()
        recorder.others.remove()
        if gauges is not None:
            gauges.remove()
        bypass.remove()
        probe.remove()
    info = account(outcome, ends[0] if ends else None)
    if gauges is not None:
        info = replace(info, measured=gauges.measurements(bypass.calls))
    if outcome.ending == "stopped":
        _leave_groups()
    try:
        write_run_info(folder, info)
    except OSError as error:
        raise cannot_write(folder, error) from None
    return info


def _how_it_failed(outcome: Outcome) -> str:
    if outcome.ending == "raised":
        return f"The script raised {outcome.error}."
    if outcome.ending == "interrupted":
        return "The script was interrupted."
    if outcome.ending == "hung":
        return "The script made no progress and was ended."
    return f"The script ended with exit status {outcome.exit_status}."


@dataclass(frozen=True)
class _Boundaries:
    """The step boundaries go to the recorder, once the gradients have been looked at.

    With the last recorded step the probe goes, unless checkpoints are to stay out.
    """

    recorder: Recorder
    probe: Probe
    keeps_probe: bool

    def restart(self) -> None:
        self.recorder.restart()

    def boundary(self) -> None:
        if not self.recorder.done:
            self.probe.look_at_gradients()
        self.recorder.boundary()
        if self.recorder.done and not self.keeps_probe:
            self.probe.remove()
            self.recorder.others.remove()


def _leave(
    folder: Path, info: RunInfo, patience_s: float, on_hang: Callable[[RunInfo], None]
) -> None:
    """End this process, which hangs, once the account is written and the others' are there."""
    try:
        write_run_info(folder, info)
        # The first process that ends makes a launcher end the others.
        wait_for_ranks(folder, info.world_size, patience_s)
        on_hang(info)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(HUNG)


def _leave_groups() -> None:
    gc.collect()  # data-loader workers end with the script's frames, which are gone by now
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
