"""``recompute-scan run``: record a few steps of a script, then report on them."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from recompute_scan.cli.machine import as_arguments, machine_options
from recompute_scan.cli.output import debug_option, print_text, progress, tell, write
from recompute_scan.errors import RunError, UsageError

if TYPE_CHECKING:
    from recompute_scan.cost.machine import Machine
    from recompute_scan.run_info import RunInfo

# How long rank 0 waits for the other ranks' accounts after its own script has ended.
_RANKS_TIMEOUT_S = 120.0
_COMMAND = "RECOMPUTE_SCAN_COMMAND"


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
@click.option("--keep-going", is_flag=True, help="Let the script run on after the last step.")
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
    keep_going: bool,
    is_module: bool,
    machine: Machine,
    debug: bool,
    script: str,
    args: tuple[str, ...],
) -> int:
    """Run SCRIPT unchanged for a few steps, find what runs again, and report on it.

    Options of recompute-scan stand before SCRIPT; everything after it belongs to the script.
    The script is ended after the last recorded step.
    """
    from recompute_scan.record.launch import launch
    from recompute_scan.record.runner import RunOptions, record

    command = shlex.join(["recompute-scan", *click.get_current_context().obj])
    folder = output or Path("recompute-scan-out") / Path(script).stem.replace("/", "-")
    if nproc_per_node is not None:
        if nproc_per_node < 1:
            raise UsageError("E207", f"--nproc-per-node {nproc_per_node} starts no process.")
        os.environ[_COMMAND] = command  # for rank 0, which knows only its own
        return launch(
            nproc_per_node,
            ["run", "--steps", str(steps), "--warmup", str(warmup)]
            + ["--timing-steps", str(timing_steps), "--output", str(folder), "--device", device]
            + ["--keep-going"] * keep_going
            + ["--debug"] * debug
            + ["-m"] * is_module
            + as_arguments(machine)
            + [script, *args],
        )
    info = record(
        RunOptions(
            target=script,
            is_module=is_module,
            args=args,
            output=folder,
            steps=steps,
            warmup=warmup,
            timing_steps=timing_steps,
            device=device,
            keep_going=keep_going,
        )
    )
    if info.rank == 0:
        _report_run(folder, info, os.environ.get(_COMMAND, command), machine)
    return info.exit_status


def _report_run(folder: Path, info: RunInfo, command: str, machine: Machine) -> None:
    from recompute_scan.pipeline import analyse
    from recompute_scan.record.launch import wait_for_ranks
    from recompute_scan.report.html import render_html
    from recompute_scan.result import to_json

    if info.world_size > 1:
        there = wait_for_ranks(folder, info.world_size, _RANKS_TIMEOUT_S)
        if missing := sorted(set(range(info.world_size)) - set(there)):
            tell(f"recompute-scan: no account from ranks {missing}; reporting on the others")
    if info.trace is None:
        error = RunError("E309", "The run gave no trace.", why=info.message)
        if info.exit_status == 0:
            raise error
        tell(f"recompute-scan: {error}")
        return
    result = analyse([folder], progress, machine=machine)
    write(folder / "result.json", to_json(result), force=True)
    report = folder / "report.html"
    write(report, render_html(result), force=True)
    print_text(result, report=str(report), next_command=command if result.findings else None)
