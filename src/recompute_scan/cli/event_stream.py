"""``--events``: messages from a command to another program while it works."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from recompute_scan.errors import ScanError

if TYPE_CHECKING:
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


def telling(tell: Callable[[str], None]) -> Callable[[str], None]:
    """The function, which then also sends its text as a warning."""
    return _sending("WarningTold", tell)


def progressing(progress: Callable[[str], None]) -> Callable[[str], None]:
    """The function, which then also sends its text as progress."""
    return _sending("ProgressTold", progress)


def _sending(event: str, write: Callable[[str], None]) -> Callable[[str], None]:
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
    from recompute_scan.events import FindingTold, ResultTold

    for one in result.findings:
        told(
            FindingTold(
                code=one.code,
                severity=one.severity,
                confidence=one.confidence,
                title=one.title,
                saving_pct=one.saving_pct,
                wrong_gradients=one.wrong_gradients,
                fix=one.fix.summary if one.fix else None,
            )
        )
    told(
        ResultTold(
            verdict=result.verdict,
            confidence=result.confidence,
            recompute_per_backward=result.recompute_per_backward,
            findings=len(result.findings),
            verified=result.verified.outcome if result.verified else None,
            result=_there(document),
            page=_there(page),
        )
    )


def told_change(change: Change) -> None:
    """A callback of the guard."""
    from recompute_scan.events import ChangeTold

    told(
        ChangeTold(
            kind=change.kind,
            step=change.step,
            modules=change.modules,
            sites=change.sites,
            before=change.before,
            after=change.after,
            text=change.text,
        )
    )


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


def events_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option, as ``events``; empty without it."""
    return click.option(
        "--events",
        type=click.Path(dir_okay=False),
        default="",
        help="Append what happens to FILE, one JSON object a line.",
        metavar="FILE",
    )(command)
