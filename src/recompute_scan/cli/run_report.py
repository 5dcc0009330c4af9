"""The report at the end of a run: who writes it when ranks fail, and what is written."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from recompute_scan.cli.output import print_text, progress, write

if TYPE_CHECKING:
    from recompute_scan.cost.machine import Machine
    from recompute_scan.result import Result


def write_report(folder: Path, result: Result) -> None:
    """Write the result and its page into the run's folder."""
    from recompute_scan.report.html import render_html
    from recompute_scan.result import to_json

    write(folder / "result.json", to_json(result), force=True)
    write(folder / "report.html", render_html(result), force=True)


def print_report(folder: Path, result: Result, command: str | None) -> None:
    """Print the summary, and the command that records again where there is something to fix."""
    again = command if result.findings and result.crash is None else None
    print_text(result, report=str(folder / "report.html"), next_command=again)


def report_failure(folder: Path, machine: Machine, *, launched: bool) -> None:
    """Report on a run of which this rank, or another, failed; one rank does it for all.

    The first that fails does it at once, since a launcher ends the others when one ends. Under
    our own launcher none does: it reports when all have ended (:func:`report_failed_ranks`).
    """
    from recompute_scan.run_info import CLAIM

    if launched:
        return
    with suppress(OSError):
        (folder / CLAIM).open("x").close()
        _report(folder, machine)


def report_failed_ranks(folder: Path, machine: Machine) -> None:
    """Report on what the ranks left, if one of them says that it failed."""
    from recompute_scan.ends import ends_in

    if ends_in([folder]).failed:
        _report(folder, machine)


def _report(folder: Path, machine: Machine) -> None:
    from recompute_scan.pipeline import analyse

    result = analyse([folder], progress, machine=machine)
    write_report(folder, result)
    print_report(folder, result, None)
