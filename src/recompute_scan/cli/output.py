"""Where commands print: results and progress.

What every command prints and writes with: results, progress, notes to the person.

What goes on, on a terminal: a line before each long piece of work, a bar where that takes long.

The bar is drawn by a thread, below the line, from two seconds on; whatever is printed next takes it
away first (:func:`clear`). Nothing of this is written to anything but a terminal.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from recompute_scan.files import write
from recompute_scan.progress import how_far
from recompute_scan.terminal import colored, fresh_line, inert, links, printable, width

if TYPE_CHECKING:
    from recompute_scan.result import Result
    from recompute_scan.result.run_record import NextCommand


_AFTER_S = 2.0
_EVERY_S = 0.2
_CELLS = 30


def bar(share: float | None, seconds: float) -> str:
    """``  ███████████████···············  50 %, 12 s``; without a share the seconds alone."""
    took = f"{seconds:.0f} s"
    if share is None:
        return f"  {took}"
    full = int(share * _CELLS)
    return f"  {'█' * full}{'·' * (_CELLS - full)}  {share:.0%}, {took}".replace("%", " %")


class Bar:
    """One at a time, below the last line that said what goes on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._began: float | None = None
        self._drawn = 0
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """A piece of work begins now."""
        with self._lock:
            self._began = self._clock()
            if self._thread is None:
                self._thread = threading.Thread(target=self._keep_drawing, daemon=True)
                self._thread.start()

    def clear(self) -> None:
        """The work is over, or something else will be printed."""
        with self._lock:
            self._began = None
            if self._drawn:
                self._write("\r" + " " * self._drawn + "\r")
                self._drawn = 0

    def draw(self) -> None:
        """Draw it as it is now, once the work takes long."""
        with self._lock:
            if self._began is None or (took := self._clock() - self._began) < _AFTER_S:
                return
            text = bar(how_far(), took)
            self._write("\r" + text + " " * max(0, self._drawn - len(text)))
            self._drawn = len(text)

    def _keep_drawing(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            try:
                self.draw()
            except (OSError, ValueError):  # the terminal is gone, or cannot spell it
                return

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


_BAR = Bar()


def clear() -> None:
    """Take the bar away: something else is printed, or nothing goes on any more."""
    _BAR.clear()


def announce(message: str) -> None:
    """Say what begins, without a bar: what follows writes to the terminal itself."""
    if sys.stderr is not None and sys.stderr.isatty():
        clear()
        sys.stderr.write(f"{fresh_line(sys.stderr)}recompute-scan: {inert(message)}\n")
        sys.stderr.flush()


def progress(message: str) -> None:
    """Say what begins, and show how far it is where it takes long."""
    announce(message)
    if sys.stderr is not None and sys.stderr.isatty():
        _BAR.begin()


Format = Literal["text", "json", "markdown"]

output_option = click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write it to a file instead.",
)
# What `check` and `lint` answer in.
ci_format_option = click.option(
    "--format",
    "style",
    type=click.Choice(["text", "json", "github", "sarif", "junit"]),
    default="text",
    show_default=True,
    help="What to print.",
)


class Number(click.FloatRange):
    """A number within a range. Nothing is above or below ``nan``, so that would be within any."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


debug_option = click.option(
    "--debug", is_flag=True, help="Show a traceback for errors of recompute-scan itself."
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
    """Print it; what every command prints on standard output passes here."""
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


def rendered(result: Result, style: Format, html: Path | None, folder: str) -> str:
    if style == "json":
        from recompute_scan.result import to_json

        return to_json(result)
    if style == "markdown":
        from recompute_scan.report.render import render_markdown

        return render_markdown(result, folder=folder)
    from recompute_scan.report.render import render_text

    report = str(html) if html else None
    return render_text(result, color=False, report=report, folder=folder)


def print_text(
    result: Result,
    *,
    report: str | None,
    after: Sequence[NextCommand] | None = None,
    folder: str = "",
) -> None:
    from recompute_scan.report.render import render_text

    color = colored(sys.stdout)
    text = render_text(
        result,
        color=color,
        report=report,
        after=after,
        folder=folder,
        width=width(sys.stdout),
        links=links(sys.stdout),
    )
    say(text, codes=color)


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
    open_page: bool = False,
) -> None:
    """Print the summary, and the commands that come next where there is something to do."""
    page = folder / "report.html"
    there = page.exists()
    clear()
    _print(fresh_line(sys.stdout))  # the script may have left a line unfinished
    print_text(result, report=str(seen_from_here(page)) if there else None, after=after)
    if open_page and there:
        show_page(page)


def print_plan(folder: Path, result: Result, _after: Sequence[NextCommand] | None = None) -> None:
    """Print the plan, or, where the script failed, what is known of that."""
    if result.plan is None:
        print_report(folder, result)
        return
    from msgspec.structs import replace

    from recompute_scan.report.blocks import Page
    from recompute_scan.report.render import next_steps
    from recompute_scan.report.sections.plan import PLANNED_CHECKPOINTS as SECTION

    page = Page(colored(sys.stdout), width(sys.stdout), links(sys.stdout))
    SECTION.text(page, result)
    next_steps(page, str(seen_from_here(folder / "report.html")), replace(result, next_steps=()))
    clear()
    _print(fresh_line(sys.stdout))
    say("\n".join(page.written) + "\n", codes=page.color)


force_option = click.option(
    "--force", is_flag=True, help="Write over a file that is there already."
)


def tell(message: str) -> None:
    """Say it on standard error; all that we say there passes here."""
    clear()
    click.echo(printable(message), err=True)
