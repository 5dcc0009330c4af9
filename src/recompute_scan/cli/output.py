"""Output of every command: results, progress, notes to the person.

The bar is drawn by a thread, below the line, from two seconds on. Whatever is printed next removes
it first (:func:`clear`). Only a terminal gets one.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO

import click

from recompute_scan.errors import ScanError
from recompute_scan.files import read, write
from recompute_scan.progress import how_far
from recompute_scan.terminal import (
    colored,
    fresh_line,
    inert,
    printable,
    unless_closed,
    width,
)

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem
    from rich.console import RenderableType
    from rich.live import Live

    from recompute_scan.events import AnyEvent, EventStream
    from recompute_scan.guarding.judge import Change
    from recompute_scan.result import Result
    from recompute_scan.result.run_record import NextCommand

# Of this process: what is open, and whether its command is the one that was given the option.
_open: list[tuple[EventStream, bool]] = []


def follow(path: str, *, command: str | None = None, folder: Path | None = None) -> None:
    """Tell it there from here on.

    Args:
        path: The file.
        command: The name of the command that was given the option; ``None`` in a process that such
            a command has started.
        folder: Where it writes.

    Raises:
        UsageError: It cannot be written (``E235``).
    """
    from recompute_scan._version import __version__
    from recompute_scan.events import CommandStarted, EventStream

    if not path:
        return
    if not _open:
        stream = EventStream(path)
        rank = os.environ.get("RANK", "")
        stream.rank = int(rank) if rank.isascii() and rank.isdigit() and len(rank) < 10 else None
        _open.append((stream, command is not None))
    if command is not None:
        where = None if folder is None else str(folder.absolute())
        told(CommandStarted(command=command, tool_version=__version__, folder=where))


def followed_at() -> str:
    """The file that other processes of this run write to as well; empty without one."""
    return _open[0][0].path if _open else ""


def told(event: AnyEvent) -> None:
    """Tell it, where anyone wants to know."""
    for stream, _ in _open:
        stream.tell(event)


def sending(
    event: Literal["WarningTold", "ProgressTold"], write: Callable[[str], None]
) -> Callable[[str], None]:
    """The function, which then also sends its text as this event."""

    def both(text: str) -> None:
        from recompute_scan import events

        told(getattr(events, event)(text=text))
        write(text)

    return both if _open else write


def showing(
    show: Callable[[Path, Result, Sequence[NextCommand] | None], None],
) -> Callable[[Path, Result, Sequence[NextCommand] | None], None]:
    """The function that shows the result in a folder, which then sends the result first."""

    def both(folder: Path, result: Result, after: Sequence[NextCommand] | None) -> None:
        told_result(result, folder / "result.json", folder / "report.html")
        show(folder, result, after)

    return both if _open else show


def told_result(result: Result, document: Path | None, page: Path | None) -> None:
    """Tell the findings, then the verdict and the files that are there."""
    if not _open:
        return
    from recompute_scan.events import FindingTold, ResultTold, like

    for one in result.findings:
        told(like(FindingTold, one, fix=one.fix.summary if one.fix else None))
    told(
        like(
            ResultTold,
            result,
            findings=len(result.findings),
            verified=result.verified.outcome if result.verified else None,
            result=_there(document),
            page=_there(page),
        )
    )


def told_change(change: Change) -> None:
    """A callback of the guard."""
    from recompute_scan.events import ChangeTold, like

    told(like(ChangeTold, change))


def failed(error: Exception) -> None:
    """Tell why the command gives up."""
    if not _open:
        return
    from recompute_scan.events import ErrorTold

    if isinstance(error, ScanError):
        event = ErrorTold(code=error.code, what=error.what, why=error.why, hint=error.hint)
    elif isinstance(error, click.ClickException):
        event = ErrorTold(code=None, what=error.format_message(), why=None, hint=None)
    else:
        event = ErrorTold(code="E701", what=f"{type(error).__name__}: {error}", why=None, hint=None)
    told(event)


def ended(status: int) -> None:
    """Tell that the command has ended, and let go of the file."""
    if not _open:
        return
    from recompute_scan.events import CommandEnded

    while _open:
        stream, given = _open.pop()
        if given:
            stream.tell(CommandEnded(exit_status=status))
        stream.close()


def _there(path: Path | None) -> str | None:
    return None if path is None or not path.exists() else str(path.absolute())


# As ``events``; empty without it.
events_option = click.option(
    "--events",
    type=click.Path(dir_okay=False),
    default="",
    help="Append events to FILE, one JSON object per line.",
    metavar="FILE",
)


# Of variables that set options: RECOMPUTE_SCAN_RUN_STEPS=3.
PREFIX = "RECOMPUTE_SCAN"
_AFTER_S = 2.0


class Bar:
    """One at a time, below the last line of progress; drawn by rich, which is loaded then."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: threading.Timer | None = None
        self._drawn: Live | None = None
        self.silent = False

    def begin(self) -> None:
        """A piece of work begins now."""
        with self._lock:
            self._waiting = threading.Timer(_AFTER_S, self._draw, (time.monotonic(),))
            self._waiting.daemon = True
            self._waiting.start()

    def clear(self) -> None:
        """The work is over, or something else will be printed."""
        with self._lock, suppress(OSError, ValueError):  # the terminal is gone
            if self._waiting is not None:
                self._waiting.cancel()
            drawn, self._waiting, self._drawn = self._drawn, None, None
            if drawn is not None:
                drawn.stop()

    def _draw(self, began: float) -> None:
        with self._lock, suppress(Exception):  # no bar is worth an error
            from rich.console import Console
            from rich.live import Live
            from rich.progress_bar import ProgressBar
            from rich.table import Table

            class Terminal(Console):
                def show_cursor(self, _show: bool = True) -> bool:
                    """Leave it: a process that is killed would leave it hidden."""
                    return False

            def bar() -> RenderableType:
                share, took = how_far(), time.monotonic() - began
                line = Table.grid(padding=(0, 2, 0, 0))
                left = f"about {took / share - took:.0f} s left" if share else f"{took:.0f} s"
                shown = () if share is None else (ProgressBar(1.0, share, 30), f"{share:4.0%}")
                line.add_row(*shown, left)
                return line

            console = Terminal(file=sys.stderr)
            if self._waiting is threading.current_thread() and console.is_interactive:
                drawn = Live(get_renderable=bar, console=console, transient=True,
                             redirect_stdout=False, redirect_stderr=False)  # fmt: skip
                drawn.start()
                self._drawn = drawn


_BAR = Bar()


def clear() -> None:
    """Take the bar away: something else is printed, or nothing goes on any more."""
    _BAR.clear()


def announce(message: str) -> None:
    """Say what begins, without a bar: what follows writes to the terminal itself."""
    if sys.stderr is not None and sys.stderr.isatty() and not _BAR.silent:
        clear()
        sys.stderr.write(f"{fresh_line(sys.stderr)}recompute-scan: {inert(message)}\n")
        sys.stderr.flush()


def progress(message: str) -> None:
    """Say what begins, and show how far it is where it takes long."""
    announce(message)
    if sys.stderr is not None and sys.stderr.isatty() and not _BAR.silent:
        _BAR.begin()


Format = Literal["text", "json", "markdown"]


def file_option(*names: str, help_text: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """An option that takes the path of one file."""
    return click.option(*names, type=click.Path(dir_okay=False, path_type=Path), help=help_text)


def format_option(*styles: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """The option ``--format``, as ``style``; text unless given."""
    return click.option(
        "--format",
        "style",
        type=click.Choice(styles),
        default="text",
        show_default=True,
        help="The output format.",
    )


output_option = file_option("--output", help_text="Write the output to a file.")


class Number(click.FloatRange):
    """A number within a range. Nothing is above or below ``nan``, so that would be within any."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


# `main` looks for it.
debug_option = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    help="Show a traceback for errors of recompute-scan itself.",
)


def harmless(text: str, style: str, *, codes: bool = False) -> str:
    """The text as it may leave this process, whatever names it holds: by what reads it."""
    from recompute_scan.report import templating

    if style in ("json", "sarif"):
        return templating.json_text(text)
    if style == "markdown":
        return templating.markdown_text(text)
    if style == "diff":  # `patch` compares it with the files, byte by byte
        return text
    if style == "github":  # each line of it is a command of ours, or begins with our name
        return inert(text, keep="\n")
    return printable(text, codes=codes)


def say(text: str, style: str = "text", *, codes: bool = False) -> None:
    """Print it; all output of commands on standard output passes here."""
    clear()
    if style == "diff" and not sys.stdout.isatty():
        _print(text.encode("utf-8", "surrogateescape"))
    else:
        style = "text" if style == "diff" else style
        _print(harmless(text, style, codes=codes), color=codes)


def _print(text: str | bytes, *, color: bool | None = None) -> None:
    try:
        click.echo(text, nl=False, color=color)
    except UnicodeEncodeError:  # what its encoding lacks is spelled out
        assert isinstance(text, str)
        encoding = sys.stdout.encoding
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        click.echo(text, nl=False, color=color)


def put(text: str, output: Path | None, style: str = "text", *, force: bool) -> None:
    """Print it, or write it to the file that `--output` names."""
    clear()
    if output is None:
        say(text, style)
    else:
        write(output, harmless(text, style), force=force)


verbose_option = click.option("-v", "--verbose", is_flag=True, help="Print everything.")


class Answer(NamedTuple):
    """How the answer is printed: as what, and, as text, how much of it."""

    style: Format = "text"
    verbose: bool = False
    quiet: bool = False

    def of(
        self,
        result: Result,
        report: str | None,
        after: Sequence[NextCommand] | None = None,
        folder: str = "",
        *,
        on: TextIO | None = None,
    ) -> str:
        """The answer, for a stream or, without one, for a file; arguments as of ``render_text``."""
        from recompute_scan.report.render import render_answer, render_markdown, render_text
        from recompute_scan.result import to_json

        if self.style == "json":
            return to_json(result)
        if self.style == "markdown":
            return render_markdown(result, after, folder)
        if self.quiet:
            return render_answer(result, color=False, width=4096).partition("\n")[0] + "\n"
        render = render_text if self.verbose else render_answer
        return render(
            result,
            color=on is not None and colored(on),
            report=report,
            after=after,
            folder=folder,
            width=width(on),
        )

    def say(self, *args: Any) -> None:
        """Print it."""
        text = self.of(*args, on=sys.stdout)
        say(text, self.style, codes=self.style == "text" and colored(sys.stdout))


# The descriptor of standard output before a script got standard error in its place.
_kept: list[int] = []


def hand_on(answer: Answer, *, launched: bool) -> None:
    """Let child processes print as this one does, and no script mix its output with JSON.

    A document for a program has standard output alone; scripts write to standard error.
    """
    for name in ("verbose", "quiet") if launched else ():
        if getattr(answer, name):
            os.environ[f"{PREFIX}_RUN_{name.upper()}"] = "1"
    if answer.style == "json":
        os.environ.update({f"{PREFIX}_RUN_FORMAT": "json"} if launched else {})
        with suppress(OSError):  # it is closed
            sys.stdout.flush()
            _kept.append(os.dup(1))
            os.dup2(2, 1)


def _give_back() -> None:
    if _kept:
        with suppress(Exception):  # the script's own object may be there, or none
            sys.stdout.flush()
        os.dup2(_kept[0], 1)
        os.close(_kept.pop())


def print_document(*folders: Path | None) -> None:
    """Print the result that is in the first of these folders that has one."""
    _give_back()
    for folder in folders:
        if folder is not None and (folder / "result.json").is_file():
            say(read(folder / "result.json").decode(), "json")
            return


def answer_options(
    *styles: Format,
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """The options for how to print the answer, as one argument: ``answer``."""

    def add(command: Callable[..., int]) -> Callable[..., int]:
        @verbose_option
        @click.option("-q", "--quiet", is_flag=True, help="Print one line, and no progress.")
        @format_option(*styles)
        @functools.wraps(command)
        def with_answer(
            *args: Any, style: Format, verbose: bool, quiet: bool, **others: Any
        ) -> int:
            _BAR.silent = quiet
            return command(*args, answer=Answer(style, verbose, quiet), **others)

        return with_answer

    return add


open_option = click.option(
    "--open", "open_page", is_flag=True, help="Show the report in the browser."
)


def show_page(page: Path) -> None:
    """Hand the page to the person's browser; say where it is if there is none."""
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        tell(f"recompute-scan: no browser was found; the report is {page}")


def seen_from_here(folder: Path) -> Path:
    """The path from the current directory, where it is below that."""
    try:
        return folder.relative_to(Path.cwd())
    except (OSError, ValueError):  # elsewhere, or the script has removed where it was
        return folder


def print_report(
    folder: Path,
    result: Result,
    after: Sequence[NextCommand] | None = None,
    *,
    answer: Answer,
    open_page: bool = False,
    silent: bool = False,
) -> None:
    """Print the answer, and the commands that come next where there is something to do."""
    page = folder / "report.html"
    there = page.exists()
    clear()
    if not silent:
        _give_back()
        with unless_closed():
            _print(fresh_line(sys.stdout))  # the script may have left a line unfinished
            answer.say(result, str(seen_from_here(page)) if there else None, after)
    if open_page and there:
        show_page(page)


def files(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The completions of arguments in shells: files and folders."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(begun, type="file")]


def newest(_context: click.Context, _parameter: click.Parameter, given: Any) -> Any:
    """A callback of arguments: folders of runs stand for their newest run."""
    from recompute_scan.files import newest_run

    return tuple(map(newest_run, given)) if isinstance(given, tuple) else newest_run(given)


force_option = click.option("--force", is_flag=True, help="Overwrite an existing file.")


def tell(message: str) -> None:
    """Say it on standard error; all that we say there passes here."""
    clear()
    with unless_closed():
        click.echo(printable(message), err=True)
