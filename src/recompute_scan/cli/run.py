"""``recompute-scan run``: record a few steps of a script, then report on them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from recompute_scan.cli.again import commands_after
from recompute_scan.cli.early import set_early
from recompute_scan.cli.followed import (
    ended,
    events_option,
    follow,
    followed_at,
    progressing,
    showing,
    telling,
)
from recompute_scan.cli.machine import machine_options
from recompute_scan.cli.output import debug_option, open_option, print_report, tell
from recompute_scan.cli.progress import announce, progress
from recompute_scan.cli.recording_options import recording_options, with_fidelity
from recompute_scan.cli.target import check_script, default_folder, launcher_in
from recompute_scan.errors import UsageError

if TYPE_CHECKING:
    from recompute_scan.cost.peaks import Machine


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Run a training script for a few steps and report on it.",
)
@recording_options
@events_option
@machine_options
@open_option
@debug_option
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    script: str,
    args: tuple[str, ...],
    is_module: bool,
    output: Path | None,
    nproc_per_node: int | None,
    verify: bool,
    guard: bool,
    without_checkpointing: bool,
    handed_on: str | None,
    events: str,
    machine: Machine,
    open_page: bool,
    debug: bool,
    **recorded: Any,
) -> int:
    """Run SCRIPT unchanged for a few steps, find what runs again, and report on it.

    Options of recompute-scan go before SCRIPT; everything after it belongs to the script.
    The script is ended after the last recorded step.

    A launcher goes after two dashes: recompute-scan run -- torchrun --nproc-per-node 4 train.py.
    The scripts that it starts are recorded.
    """
    whole: list[str] = click.get_current_context().obj
    launcher = launcher_in(whole, script, args)
    folder = output or default_folder(script, args, launched=launcher is not None)
    follow(events, command="run", folder=folder)
    if launcher is None and not is_module:
        check_script(whole, script, args)
    recorded = with_fidelity(click.get_current_context(), recorded)
    if handed_on is None:
        announce(f"starting {script}")  # before torch is imported, which takes seconds
    if launcher is None and nproc_per_node is None and not is_module:
        set_early(Path(script))
    if guard:
        from recompute_scan.cli.guarded import run_guarded_script

        if launcher is not None or verify:
            raise UsageError(
                "E233",
                "--guard goes with a script, and not with a launcher or --verify.",
                hint="below a launcher: torchrun --no-python recompute-scan run --guard train.py",
            )
        return run_guarded_script(script, args, folder, is_module, nproc_per_node)
    from msgspec.structs import replace

    from recompute_scan.record.reporting import Reporting
    from recompute_scan.record.run_folder import beside
    from recompute_scan.record.run_options import RunOptions, decode
    from recompute_scan.record.ways import Handed, Way, run_and_report

    if handed_on is not None:
        try:
            handed = decode(handed_on, Handed)
        except ValueError:
            from recompute_scan.joining import run_as_it_is

            run_as_it_is()
        options = replace(handed.options, target=script, args=args, is_module=is_module)
        machine, after = handed.machine, handed.after
        follow(options.events)
    else:
        folder = folder.absolute()  # the script may change the current directory
        may_verify = launcher is None and not verify and "RANK" not in os.environ
        timed = recorded["steps"] or recorded["timing_steps"]
        after = (
            commands_after(whole, output, folder, verify=may_verify, script=script) if timed else ()
        )
        place, earlier = beside(folder)
        options = RunOptions(
            script,
            is_module,
            args,
            place,
            measure=verify,
            events=followed_at(),
            takes_place_of=earlier,
            **recorded,
        )
    way = Way(launcher, nproc_per_node, verify, without_checkpointing)
    way.check(options)
    reporting = Reporting(
        options.output,
        machine,
        after,
        launched=handed_on is not None,
        show=showing(partial(print_report, open_page=open_page)),
        tell=telling(tell),
        progress=progressing(progress),
        leaving=ended,
        takes_place_of=options.takes_place_of,
    )
    return run_and_report(way, options, reporting, ["--debug"] * debug)
