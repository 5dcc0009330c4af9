"""``recompute-scan plan``: which layers to recompute within a limit, and the proof of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from recompute_scan.cli.event_stream import (
    ended,
    events_option,
    follow,
    followed_at,
    progressing,
    showing,
    telling,
)
from recompute_scan.cli.options import (
    Grouped,
    module_option,
    output_folder,
    processes_option,
    timeout_option,
)
from recompute_scan.cli.output import (
    Answer,
    Number,
    announce,
    answer_options,
    debug_option,
    files,
    print_report,
    progress,
    tell,
)
from recompute_scan.cli.run import check_script, script_folder, set_early
from recompute_scan.run_folders import new_run, remove_if_empty


@click.command(
    cls=Grouped,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Say which layers to checkpoint within a memory limit, and prove it.",
)
@click.option(
    "--memory",
    metavar="AMOUNT|N%|free",
    help="Memory to keep to: 60GB, 80% of today's peak, or all that is free.  [default: 100%]",
)
@click.option(
    "--step-time",
    "step_time_ms",
    metavar="MS",
    type=Number(min=0, min_open=True),
    help="Longest step to keep to instead, for the least memory.",
)
@click.option(
    "--verify/--no-verify",
    default=True,
    show_default=True,
    help="Apply the plan in memory and measure it.",
)
@click.option(
    "--timing-steps", default=10, show_default=True, help="Steps to time of each arrangement."
)
@click.option("--steps", default=3, show_default=True, help="Steps to profile.")
@output_folder
@processes_option
@timeout_option
@module_option
@answer_options("text", "json")
@events_option
@debug_option
@click.argument("script", shell_complete=files)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def plan(
    script: str,
    args: tuple[str, ...],
    memory: str | None,
    step_time_ms: float | None,
    verify: bool,
    is_module: bool,
    output: Path | None,
    nproc_per_node: int | None,
    events: str,
    answer: Answer,
    **recorded: Any,
) -> int:
    """Find the fastest way to checkpoint SCRIPT's layers within a memory limit.

    It is run three times: as it is, then with checkpoints put on and taken off in memory from step
    to step, then with the plan. Nothing is edited. On a GPU the limit is on what torch allocates
    there, on a CPU on what is saved for the backward pass.
    """
    from recompute_scan.cost.plan import read_wish

    folder = output or script_folder(script, args, launched=False, ending="-plan")
    wish = read_wish(memory, step_time_ms)
    if not is_module:
        check_script(click.get_current_context().obj, script, args)
    folder = (output or new_run(folder)).absolute()
    click.get_current_context().call_on_close(partial(remove_if_empty, folder))
    follow(events, command="plan", folder=folder)
    announce(f"starting {script}")
    if nproc_per_node is None and not is_module:
        set_early(Path(script))
    from recompute_scan.record.finish import Reporting, Way, plan_and_report
    from recompute_scan.record.options import RunOptions, beside
    from recompute_scan.record.verify import Asked

    place, earlier = beside(folder, plans=True)
    if folder not in (place, earlier):
        tell(f"recompute-scan: {folder} keeps the result of a run; the plan goes to {place}")
    options = RunOptions(
        script, is_module, args, place, events=followed_at(), takes_place_of=earlier, **recorded
    )
    way = Way(None, nproc_per_node)
    way.check(options)
    from recompute_scan.cost.flops import UNKNOWN_MACHINE

    reporting = Reporting(
        place,
        UNKNOWN_MACHINE,
        None,
        launched=False,
        show=showing(partial(print_report, answer=answer)),
        print_line=telling(tell),
        progress=progressing(progress),
        leaving=ended,
        takes_place_of=earlier,
    )
    return plan_and_report(way, options, reporting, Asked(wish, verify))
