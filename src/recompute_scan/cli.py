"""The commands: parse, call, print. What they do lives in the packages below.

Heavy imports stay inside the commands, so that ``--help`` and errors are instant.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import click

from recompute_scan._version import __version__
from recompute_scan.errors import RunError, ScanError, UsageError

if TYPE_CHECKING:
    from recompute_scan.result import Result
    from recompute_scan.run_info import RunInfo

Format = Literal["text", "json", "markdown"]
_Command = TypeVar("_Command", bound=Callable[..., int])
# How long rank 0 waits for the other ranks' accounts after its own script has ended.
_RANKS_TIMEOUT_S = 120.0
_COMMAND = "RECOMPUTE_SCAN_COMMAND"
_BUG = "https://github.com/recompute-scan/recompute-scan/issues"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="recompute-scan")
def cli() -> None:
    r"""Find activation checkpointing that runs the forward pass more often than needed.

    \b
    recompute-scan run train.py          record a few steps of a script and say
    recompute-scan analyze trace.json    say what a trace of torch.profiler shows
    """


@cli.command(
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
@click.option("--debug", is_flag=True, help="Show a traceback for errors of recompute-scan itself.")
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
        _report_run(folder, info, os.environ.get(_COMMAND, command))
    return info.exit_status


def _report_run(folder: Path, info: RunInfo, command: str) -> None:
    from recompute_scan.pipeline import analyse
    from recompute_scan.record.launch import wait_for_ranks
    from recompute_scan.report.html import render_html
    from recompute_scan.result import to_json

    if info.world_size > 1:
        there = wait_for_ranks(folder, info.world_size, _RANKS_TIMEOUT_S)
        if missing := sorted(set(range(info.world_size)) - set(there)):
            _tell(f"recompute-scan: no account from ranks {missing}; reporting on the others")
    if info.trace is None:
        error = RunError("E309", "The run gave no trace.", why=info.message)
        if info.exit_status == 0:
            raise error
        _tell(f"recompute-scan: {error}")
        return
    result = analyse([folder], _progress)
    _write(folder / "result.json", to_json(result))
    report = folder / "report.html"
    _write(report, render_html(result))
    _print_text(result, report=str(report), next_command=command if result.findings else None)


# Each names a field of `recompute_scan.trace.Limits`, which has the defaults and the reasons.
_LIMITS = (
    *("inflated-bytes", "ratio", "depth", "events", "distinct", "event-bytes", "members"),
    "name-chars",
)


def _limit_options(command: _Command) -> _Command:
    """Options that lift the limits on what is read; the errors name them."""
    for name in reversed(_LIMITS):
        help_text = "Lift this limit on what is read from a trace."
        option = click.option(f"--max-{name}", type=click.IntRange(1), hidden=True, help=help_text)
        command = option(command)
    return command


@cli.command(short_help="Say what recorded traces show.")
@click.argument("traces", nargs=-1, required=True)
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write the report.")
@click.option(
    "--format",
    "style",
    type=click.Choice(["text", "json", "markdown"]),
    default="text",
    show_default=True,
    help="What to print.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write it to a file instead.",
)
@click.option("--debug", is_flag=True, help="Show a traceback for errors of recompute-scan itself.")
@_limit_options
def analyze(
    traces: tuple[str, ...],
    html: Path | None,
    style: Format,
    output: Path | None,
    debug: bool,
    **limits: int | None,
) -> int:
    """Find what runs again in TRACES: files of torch.profiler, or folders of one a rank.

    A trace is Kineto's JSON (plain, .gz, .zst, .zip), Nsight Systems' SQLite export, or a remote
    address such as s3://bucket/run/. Needs neither torch nor the script that made them.
    """
    # numpy's linear algebra starts idle threads that cost more than reading a small trace.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from recompute_scan.pipeline import analyse
    from recompute_scan.trace import Limits

    lifted = {name.removeprefix("max_"): n for name, n in limits.items() if n is not None}
    result = analyse(traces, _progress, Limits(**lifted))
    if html is not None:
        from recompute_scan.report.html import render_html

        _write(html, render_html(result))
    if output is not None:
        _write(output, _rendered(result, style, html))
    elif style == "text":
        _print_text(result, report=str(html) if html else None, next_command=None)
    else:
        click.echo(_rendered(result, style, html), nl=False)
    return 0


@cli.command(short_help="Make the HTML report again from a result.")
@click.argument("result", type=click.Path(path_type=Path))
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write it.  [default: report.html beside the result]",
)
@click.option("--debug", is_flag=True, help="Show a traceback for errors of recompute-scan itself.")
def report(result: Path, html: Path | None, debug: bool) -> int:
    """Make the HTML report again from RESULT, the JSON that `run` or `analyze` wrote."""
    from recompute_scan.errors import InputError
    from recompute_scan.report.html import render_html
    from recompute_scan.result import from_json

    try:
        text = result.read_bytes()
    except OSError as error:
        raise InputError("E301", f"Cannot read {result}.", why=error.strerror) from None
    target = html or result.with_name("report.html")
    _write(target, render_html(from_json(text)))
    click.echo(str(target))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; see the table in ``docs/messages.md``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = cli.main(
            arguments, prog_name="recompute-scan", standalone_mode=False, obj=arguments
        )
    except click.exceptions.Abort:
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except ScanError as error:
        _tell(f"recompute-scan: {error}")
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output left; nothing is wrong with it or with us.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if "--debug" in arguments:
            raise
        _tell(
            f"recompute-scan: a bug in recompute-scan: {type(error).__name__}: {error} [E701]\n"
            f"try: run it again with --debug and report the traceback at {_BUG}"
        )
        return 70
    return status if isinstance(status, int) else 0


def _rendered(result: Result, style: Format, html: Path | None) -> str:
    if style == "json":
        from recompute_scan.result import to_json

        return to_json(result)
    if style == "markdown":
        from recompute_scan.report.markdown import render_markdown

        return render_markdown(result)
    from recompute_scan.report.text import render_text

    return render_text(result, color=False, report=str(html) if html else None)


def _print_text(result: Result, *, report: str | None, next_command: str | None) -> None:
    from recompute_scan.report.text import render_text

    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    text = render_text(result, color=color, report=report, next_command=next_command)
    click.echo(text, nl=False, color=color)


def _write(path: Path, text: str) -> None:
    """Write a whole file or none."""
    partial = path.with_name(path.name + ".part")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise UsageError("E208", f"Cannot write {path}.", why=error.strerror) from None


def _progress(message: str) -> None:
    if sys.stderr.isatty():
        _tell(f"recompute-scan: {message}")


def _tell(message: str) -> None:
    click.echo(message, err=True)
