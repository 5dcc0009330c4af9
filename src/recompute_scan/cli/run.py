"""``recompute-scan run``: record a few steps of a script, then report on them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from recompute_scan.cli.again import commands_after
from recompute_scan.cli.early import set_early
from recompute_scan.cli.machine import as_arguments, machine_options
from recompute_scan.cli.output import debug_option, progress, tell
from recompute_scan.cli.run_report import print_report, report_failed_ranks, report_failure
from recompute_scan.cli.target import check_script, default_folder, launcher_in
from recompute_scan.errors import RunError, ScanError, UsageError
from recompute_scan.report.folder import write_report

if TYPE_CHECKING:
    from recompute_scan.cost.peaks import Machine
    from recompute_scan.record.run_options import RunOptions
    from recompute_scan.result import Result
    from recompute_scan.run_info import RunInfo

# How long rank 0 waits for the other ranks' run records after its own script has ended.
_RANKS_TIMEOUT_S = 120.0
_COMMANDS = "RECOMPUTE_SCAN_COMMANDS"


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Run a training script for a few steps and report on it.",
)
@click.option("--steps", default=5, show_default=True, help="Steps to profile.")
@click.option("--warmup", default=3, show_default=True, help="Steps before anything is recorded.")
@click.option(
    "--timing-steps", default=10, show_default=True, help="Steps to time without the profiler."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for traces and report.  [default: recompute-scan-out/NAME]",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="What to record.",
)
@click.option("--nproc-per-node", type=int, help="Start that many processes with torchrun.")
@click.option(
    "--ranks",
    metavar="0|all|LIST",
    default="0,last",
    show_default=True,
    help="Ranks to record, such as 0,8-15; all stop after the same step.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Run it again with the fix applied in memory, and measure what that changes.",
)
@click.option(
    "--without-checkpointing",
    is_flag=True,
    help="With --verify: measure it without any checkpoint too, where it fits into memory.",
)
@click.option(
    "--fidelity/--no-fidelity",
    default=True,
    show_default=True,
    help="Compare the recomputes of one more step with their forward.",
)
@click.option("--keep-going", is_flag=True, help="Let the script run on after the last step.")
@click.option(
    "--timeout",
    default=600.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds without progress after which a hanging run is ended; 0 for never.",
)
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module, as with `python -m`.")
@machine_options
@debug_option
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    steps: int,
    warmup: int,
    timing_steps: int,
    output: Path | None,
    device: Literal["auto", "cpu", "cuda"],
    nproc_per_node: int | None,
    ranks: str,
    verify: bool,
    without_checkpointing: bool,
    fidelity: bool,
    keep_going: bool,
    timeout: float,
    is_module: bool,
    machine: Machine,
    debug: bool,
    script: str,
    args: tuple[str, ...],
) -> int:
    """Run SCRIPT unchanged for a few steps, find what runs again, and report on it.

    Options of recompute-scan go before SCRIPT; everything after it belongs to the script.
    The script is ended after the last recorded step.

    A launcher goes after two dashes: recompute-scan run -- torchrun --nproc-per-node 4 train.py.
    The scripts that it starts are recorded.
    """
    whole: list[str] = click.get_current_context().obj
    launcher = launcher_in(whole, script, args)
    if launcher is None and not is_module:
        check_script(whole, script, args)
    launched = _COMMANDS in os.environ
    if not launched:
        progress(f"starting {script}")  # before torch is imported, which takes seconds
    if launcher is None and nproc_per_node is None and not is_module:
        set_early(Path(script))
    from recompute_scan.record.launch.launcher import launch, launch_with
    from recompute_scan.record.launch.runner import record
    from recompute_scan.record.run_options import RunOptions
    from recompute_scan.record.scope import chosen

    folder = output or default_folder(script, args, launched=launcher is not None)
    folder = folder.absolute()  # the script may change the current directory
    may_verify = launcher is None and not verify and "RANK" not in os.environ
    after = commands_after(whole, output, folder, verify=may_verify)
    if launcher is not None and (verify or nproc_per_node is not None or is_module):
        raise UsageError(
            "E223",
            f"{script} starts the processes itself: --verify, --nproc-per-node and -m are for a "
            "script that recompute-scan starts.",
            hint="leave the launcher out and give --nproc-per-node, or leave the option out",
        )
    if nproc_per_node is not None and nproc_per_node < 1:
        raise UsageError("E207", f"--nproc-per-node {nproc_per_node} starts no process.")
    if not chosen(ranks, nproc_per_node or 1) and nproc_per_node is not None:
        raise UsageError("E224", f"--ranks {ranks} names none of {nproc_per_node} processes.")
    if without_checkpointing and not verify:
        raise UsageError("E220", "--without-checkpointing measures only together with --verify.")
    options = RunOptions(
        target=script,
        is_module=is_module,
        args=args,
        output=folder,
        steps=steps,
        warmup=warmup,
        timing_steps=timing_steps,
        device=device,
        keep_going=keep_going,
        measure=verify,
        timeout_s=timeout,
        ranks=ranks,
        fidelity=fidelity,
    )
    if verify:
        return _verify(
            options, nproc_per_node, after, machine, without_checkpointing=without_checkpointing
        )
    if nproc_per_node is not None or launcher is not None:
        os.environ[_COMMANDS] = json.dumps(after)  # for rank 0, which knows only its own
        given = (
            ["--steps", str(steps), "--warmup", str(warmup), "--timing-steps", str(timing_steps)]
            + ["--output", str(folder), "--device", device, "--timeout", str(timeout)]
            + ["--ranks", ranks]
            + ["--keep-going"] * keep_going
            + ["--no-fidelity"] * (not fidelity)
            + ["--debug"] * debug
            + as_arguments(machine)
        )
        if launcher is not None:
            began = time.time()
            status = launch_with([launcher, *args], given)
            _see_that_some_took_part(folder, began, status)
        else:
            assert nproc_per_node is not None
            target = ["-m"] * is_module + [script, *args]
            status = launch(nproc_per_node, ["run", *given, *target])
        if status:
            report_failed_ranks(folder, machine)
        return status

    def conclude(info: RunInfo) -> None:
        if info.end is not None:
            report_failure(folder, machine, launched=launched)
        elif info.rank == 0:
            _report_run(folder, info, after, machine)

    def conclude_at_once(info: RunInfo) -> None:
        try:
            conclude(info)
        except ScanError as error:
            tell(f"recompute-scan: {error}")

    info = record(
        options,
        on_hang=lambda _: report_failure(folder, machine, launched=launched),
        on_exit=conclude_at_once,
    )
    conclude(info)
    return info.exit_status


def _see_that_some_took_part(folder: Path, began: float, status: int) -> None:
    records = (*folder.glob("run-rank*.json"), *folder.glob("so-far-rank*.json"))
    if any(record.stat().st_mtime >= began - 1 for record in records):
        return
    error = RunError(
        "E319",
        "No script that the launcher started took part.",
        why="either it ran none with Python, or its Python is another than the one that "
        "recompute-scan is installed in",
        hint="install recompute-scan where the script runs, or start it there: "
        "torchrun … -m recompute_scan run train.py",
    )
    if status == 0:
        raise error
    tell(f"recompute-scan: {error}")


def _verify(
    options: RunOptions,
    nproc_per_node: int | None,
    after: Sequence[str],
    machine: Machine,
    *,
    without_checkpointing: bool,
) -> int:
    """Record in processes of their own, report, then measure with the fix and report again."""
    from recompute_scan.record.launch.launcher import rank_facts
    from recompute_scan.record.verify.rounds import verify
    from recompute_scan.record.verify.trial import run_trial
    from recompute_scan.run_info import read_run_info, run_info_name

    if rank_facts().world_size > 1:
        raise UsageError(
            "E221",
            "--verify starts the script several times, and this is one of several processes.",
            hint="leave torchrun out, and give --nproc-per-node to recompute-scan",
        )
    if options.timing_steps < 1:
        raise UsageError("E222", "--verify compares timed steps, and --timing-steps 0 times none.")
    folder = options.output
    status = run_trial(options, nproc_per_node, None)
    record = folder / run_info_name(0)
    if status == UsageError.exit_status and not record.exists():
        return status  # it has said why
    info = read_run_info(record)
    result = _result_of(folder, info, machine)
    if result is None:
        return info.exit_status
    write_report(folder, result)  # whatever comes after, this is not lost
    if info.exit_status == 0:
        result = verify(
            result,
            options,
            nproc_per_node,
            without_checkpointing=without_checkpointing,
            on_progress=progress,
        )
        write_report(folder, result)
    print_report(folder, result, after)
    return info.exit_status


def _report_run(folder: Path, info: RunInfo, after: Sequence[str], machine: Machine) -> None:
    from recompute_scan.analysis.ranks import ends_in
    from recompute_scan.record.launch.launcher import wait_for_ranks
    from recompute_scan.run_info import accept_so_far

    if info.world_size > 1:
        there = wait_for_ranks(folder, info.world_size, _RANKS_TIMEOUT_S)
        if missing := sorted(set(range(info.world_size)) - set(there)):
            tell(f"recompute-scan: no run record from ranks {missing}; reporting on the others")
            accept_so_far(folder)
    if ends_in([folder]).failed:  # another rank failed, and not this one
        report_failure(folder, machine, launched=_COMMANDS in os.environ)
        return
    result = _result_of(folder, info, machine)
    if result is not None:
        try:
            write_report(folder, result)
        finally:  # a full disk keeps nobody from reading it here
            print_report(folder, result, _given(after))


def _given(after: Sequence[str]) -> Sequence[str]:
    """What the process that started the ranks says comes next; else what this one does."""
    given: Sequence[str] = json.loads(os.environ.get(_COMMANDS, "null")) or after
    return given


def _result_of(folder: Path, info: RunInfo, machine: Machine) -> Result | None:
    """What the run's traces show; ``None`` where a failed script left nothing to tell."""
    from recompute_scan.analysis.pipeline import analyse
    from recompute_scan.analysis.ranks import ends_in

    ends = ends_in([folder])
    traced = info.trace or any(record.trace for record in ends.records)
    if not traced and not ends.failed:
        error = RunError("E309", "The run gave no trace.", why=info.message)
        if info.exit_status == 0 and info.bug is None:  # a bug of ours is no failure of the script
            raise error
        tell(f"recompute-scan: {error}")
        return None
    return analyse([folder], progress, machine=machine)
