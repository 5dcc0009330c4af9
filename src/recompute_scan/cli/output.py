"""What every command prints and writes with: results, files, progress, notes to the person."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from recompute_scan.errors import UsageError

if TYPE_CHECKING:
    from recompute_scan.result import Result

Format = Literal["text", "json", "markdown"]

debug_option = click.option(
    "--debug", is_flag=True, help="Show a traceback for errors of recompute-scan itself."
)


def rendered(result: Result, style: Format, html: Path | None) -> str:
    if style == "json":
        from recompute_scan.result import to_json

        return to_json(result)
    if style == "markdown":
        from recompute_scan.report.markdown import render_markdown

        return render_markdown(result)
    from recompute_scan.report.text import render_text

    return render_text(result, color=False, report=str(html) if html else None)


def print_text(result: Result, *, report: str | None, next_command: str | None) -> None:
    from recompute_scan.report.text import render_text

    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    text = render_text(result, color=color, report=report, next_command=next_command)
    click.echo(text, nl=False, color=color)


force_option = click.option(
    "--force", is_flag=True, help="Write over a file that is there already."
)


def write(path: Path, text: str, *, force: bool = False) -> None:
    """Write a whole file or none; see :func:`written`."""
    with written(path, force=force) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def written(path: Path, *, force: bool = False) -> Iterator[Path]:
    """A file to fill beside ``path``, which it becomes at the end if nothing went wrong.

    Raises:
        UsageError: There is such a file and ``force`` was not given (``E209``), or it cannot be
            written (``E208``).
    """
    refuse_existing(path, force=force)
    partial = path.with_name(path.name + ".part")
    try:
        # Never through a link that somebody put there.
        partial.unlink(missing_ok=True)
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        try:
            yield partial
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError("E208", f"Cannot write {path}.", why=error.strerror) from None


def refuse_existing(path: Path, *, force: bool) -> None:
    """Refuse to write over what is there, before any work is done for it (``E209``)."""
    if not force and (path.exists() or path.is_symlink()):
        raise UsageError("E209", f"{path} is there already.", hint="--force writes over it")


def progress(message: str) -> None:
    if sys.stderr.isatty():
        tell(f"recompute-scan: {message}")


def tell(message: str) -> None:
    click.echo(message, err=True)
