"""``recompute-scan analyze``: what recorded traces show."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, TypeVar

import click

from recompute_scan.cli.options import Grouped, machine_options
from recompute_scan.cli.output import (
    Answer,
    answer_options,
    clear,
    debug_option,
    events_option,
    file_option,
    files,
    follow,
    force_option,
    newest,
    output_option,
    progress,
    put,
    sending,
    tell,
    told_result,
)
from recompute_scan.errors import UsageError
from recompute_scan.files import content, refuse_existing, write, write_whole
from recompute_scan.progress import paused

if TYPE_CHECKING:
    from recompute_scan.cost.flops import Machine
    from recompute_scan.result import Result
    from recompute_scan.trace import Limits

_Command = TypeVar("_Command", bound=Callable[..., int])
# Each names a field of `recompute_scan.trace.Limits`, which has the defaults and the reasons.
_LIMITS = (
    *("inflated-bytes", "ratio", "depth", "events", "distinct", "threads", "event-bytes"),
    *("members", "name-chars"),
)


def limit_options(command: _Command) -> _Command:
    """Options that lift the limits on what is read; the errors name them."""
    for name in reversed(_LIMITS):
        help_text = "Lift this limit on what is read from a trace."
        option = click.option(f"--max-{name}", type=click.IntRange(1), hidden=True, help=help_text)
        command = option(command)
    return command


def lifted(given: Mapping[str, int | None]) -> Limits:
    """The limits with those that :func:`limit_options` were given."""
    from recompute_scan.trace import Limits

    return Limits(**{name.removeprefix("max_"): n for name, n in given.items() if n is not None})


@click.command(cls=Grouped, short_help="Say what recorded traces show.")
@click.argument("traces", nargs=-1, required=True, callback=newest, shell_complete=files)
@file_option("--html", help_text="Write the report.")
@answer_options("text", "json", "markdown")
@output_option
@file_option(
    "--perfetto",
    help_text="Write the trace again with tracks of the recomputes, to open in Perfetto.",
)
@force_option
@machine_options
@click.option("--hta", is_flag=True, help="Add the breakdowns of Holistic Trace Analysis.")
@click.option(
    "--workers",
    type=click.IntRange(1),
    help="Processes that read the ranks.  [default: one per core where that is faster]",
)
@click.option("--dask", metavar="ADDRESS", help="Dask scheduler; its workers read the ranks.")
@events_option
@debug_option
@limit_options
def analyze(
    traces: tuple[str, ...],
    html: Path | None,
    answer: Answer,
    output: Path | None,
    perfetto: Path | None,
    force: bool,
    machine: Machine,
    hta: bool,
    workers: int | None,
    dask: str | None,
    events: str,
    **limits: int | None,
) -> int:
    """Find what runs again in TRACES: files of torch.profiler, or folders with one per rank.

    A trace is Kineto's JSON (plain, .gz, .zst, .zip), Nsight Systems' SQLite export, a remote
    address such as s3://bucket/run/, or - for standard input. Needs neither torch nor the
    script that made them.
    """
    follow(events, command="analyze")
    with paused():  # no module leaves garbage behind when it is loaded
        from recompute_scan.analysis.pipeline import analyse
        from recompute_scan.workers import AUTOMATIC, Workers

    read_from = traces[0] if len(traces) == 1 and Path(traces[0]).exists() else ""
    if "-" in traces:
        given = click.get_current_context().with_resource(
            NamedTemporaryFile(prefix="stdin-")  # noqa: SIM115 - the context closes it
        )
        shutil.copyfileobj(sys.stdin.buffer, given)
        given.flush()
        traces = tuple(given.name if one == "-" else one for one in traces)
    _refuse_scripts(traces)
    others = (Path(events) if events else None, html and html.parent / "fix.patch")
    refuse_existing(html, output, perfetto, force=force, others=others)
    where = AUTOMATIC if workers is None and dask is None else Workers(workers or 1, dask)
    told = sending("ProgressTold", progress)
    result = analyse(traces, told, lifted(limits), machine, hta=hta, workers=where)
    clear()
    if perfetto is not None:
        from recompute_scan.analysis.tracks import add_tracks

        add_tracks(traces, perfetto, force=force, limits=lifted(limits))
    from recompute_scan.report.summary import with_next_steps

    result = with_next_steps(result, folder=read_from)
    if html is not None:
        from recompute_scan.report.render import render_html

        write(html, render_html(result, folder=read_from), force=force)
        _write_fix(result, html.with_name("fix.patch"), force=force)
    shown = result, str(html) if html else None, None, read_from
    if output is not None:
        put(answer.of(*shown), output, answer.style, force=force)
    else:
        answer.say(*shown)
    told_result(result, output if answer.style == "json" else None, html)
    return 0


def _write_fix(result: Result, target: Path, *, force: bool) -> None:
    """Write the fix next to the page; without ``force`` a different one that is there stays."""
    from recompute_scan.result.patch import patch

    fix = patch(result, Path.cwd())
    if fix is None:
        return
    if not force and os.path.lexists(target):
        with suppress(OSError):
            if content(target) == fix:
                return
        tell(f"recompute-scan: {target} exists and stays; --force overwrites it")
        return
    try:
        write_whole(target, fix)
    except OSError as error:
        raise UsageError("E208", f"Cannot write {target}.", why=error.strerror) from None


def _refuse_scripts(traces: tuple[str, ...]) -> None:
    """Say to whom a script is to be given (``E239``)."""
    for name in traces:
        if name.endswith(".py") and Path(name).is_file():
            raise UsageError(
                "E239",
                f"{name} is a Python script, not a trace.",
                hint="recompute-scan run records it; recompute-scan lint reads it",
            )
