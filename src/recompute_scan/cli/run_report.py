"""The report at the end of a run: who writes it when ranks fail, and what is written."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from recompute_scan.cli.again import seen_from_here
from recompute_scan.cli.output import print_text, progress
from recompute_scan.report.folder import write_report
from recompute_scan.terminal import fresh_line

if TYPE_CHECKING:
    from recompute_scan.cost.peaks import Machine
    from recompute_scan.result import Result

# How long a rank that failed too waits for the report of another.
_REPORT_TIMEOUT_S = 120.0
_POLL_S = 0.1


def print_report(folder: Path, result: Result, after: Sequence[str] = ()) -> None:
    """Print the summary, and the commands that come next where there is something to fix."""
    useful = result.findings and result.crash is None
    page = folder / "report.html"
    there = page.exists()
    click.echo(fresh_line(sys.stdout), nl=False)  # the script may have left a line unfinished
    print_text(
        result, report=str(seen_from_here(page)) if there else None, after=after if useful else ()
    )


def report_failure(folder: Path, machine: Machine, *, launched: bool) -> None:
    """Report on a run of which this rank, or another, failed; one rank does it for all.

    The first that fails does it at once, since a launcher ends the others when one ends. Under
    our own launcher none does: it reports when all have ended (:func:`report_failed_ranks`).
    """
    from recompute_scan.run_info import CLAIM

    if launched:
        return
    claim = folder / CLAIM
    try:
        claim.open("x").close()
    except FileExistsError:
        _wait_for_report(claim)  # or the launcher would end the rank that writes it
        return
    # A launcher that ends the others now means this one too, and gives it some seconds.
    with _deaf_to_sigterm():
        try:
            _report(folder, machine)
        finally:
            with suppress(OSError):
                claim.write_text("done")


@contextmanager
def _deaf_to_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # the watchdog's: only the main thread may choose, and it hangs
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_for_report(claim: Path) -> None:
    deadline = time.monotonic() + _REPORT_TIMEOUT_S
    with suppress(OSError):
        while claim.stat().st_size == 0 and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def report_failed_ranks(folder: Path, machine: Machine) -> None:
    """Report on what the ranks left, if one of them failed or they left traces all the same."""
    from recompute_scan.analysis.ranks import ends_in
    from recompute_scan.run_info import accept_so_far

    accept_so_far(folder)
    ends = ends_in([folder])
    if ends.failed or any(record.trace for record in ends.records):
        _report(folder, machine)


def _report(folder: Path, machine: Machine) -> None:
    from recompute_scan.analysis.pipeline import analyse
    from recompute_scan.run_info import accept_so_far

    accept_so_far(folder)
    result = analyse([folder], progress, machine=machine)
    try:
        write_report(folder, result)
    finally:  # a full disk keeps nobody from reading it here
        print_report(folder, result)
