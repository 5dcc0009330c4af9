"""The report at the end of a run: which of its processes writes it, and what it is made from.

The analysis is imported when the script has ended, which would find it among its modules.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from recompute_scan.cost.peaks import Machine
from recompute_scan.errors import RunError, ScanError
from recompute_scan.record.launch.launcher import wait_for_ranks
from recompute_scan.record.run_folder import take_place, write_report
from recompute_scan.run_info import CLAIM, NextCommand, RunInfo, accept_so_far

if TYPE_CHECKING:
    from recompute_scan.analysis.ranks import Ends
    from recompute_scan.result import Result

# How long rank 0 waits for the other ranks' run records after its own script has ended.
_RANKS_TIMEOUT_S = 120.0
# How long a rank that failed too waits for the report of another.
_REPORT_TIMEOUT_S = 120.0
_POLL_S = 0.1


class Reporting(Struct, frozen=True):
    """Reports on the run in one folder.

    Attributes:
        folder: The run's folder.
        takes_place_of: The folder of an earlier result, as in
            :class:`~recompute_scan.record.run_options.RunOptions`.
        machine: What a person says of the device.
        after: The commands that come next.
        launched: Whether a process of ours started the ranks, and reports when all have ended.
        show: Gets the folder, a result and the commands that come next.
        tell: Gets what else the person should know.
        progress: Gets what goes on.
        leaving: Gets the exit status where the process is about to end behind everyone's back.
    """

    folder: Path
    machine: Machine
    after: Sequence[NextCommand]
    launched: bool
    show: Callable[[Path, Result, Sequence[NextCommand]], None]
    tell: Callable[[str], None]
    progress: Callable[[str], None]
    leaving: Callable[[int], None] = lambda _: None
    takes_place_of: Path | None = None

    def conclude(self, info: RunInfo) -> None:
        """This rank's run is over: report on it, where that is this rank's to do."""
        if info.end is not None:
            self.failure()
        elif info.rank == 0:
            self._run(info)

    def conclude_at_once(self, info: RunInfo) -> None:
        """The same where nobody is left to catch an error."""
        try:
            self.conclude(info)
        except ScanError as error:
            self.tell(f"recompute-scan: {error}")
            self.stays()
        finally:
            self.leaving(info.exit_status)

    def hung(self, info: RunInfo) -> None:
        """This rank hangs: report on it, or let another do it."""
        try:
            self.failure()
        finally:
            self.leaving(info.exit_status)

    def failure(self) -> None:
        """Report on a run of which this rank, or another, failed; one rank does it for all.

        The first that fails does it at once, since a launcher ends the others when one ends. Under
        our own launcher none does: it reports when all have ended (:meth:`failed_ranks`).
        """
        if self.launched:
            return
        claim = self.folder / CLAIM
        try:
            claim.open("x").close()
        except FileExistsError:
            _wait_for_report(claim)  # or the launcher would end the rank that writes it
            return
        # A launcher that ends the others now means this one too, and gives it some seconds.
        with _deaf_to_sigterm():
            try:
                self._failed()
            finally:
                with suppress(OSError):
                    claim.write_text("done")

    def failed_ranks(self) -> None:
        """Report on what the ranks left, if one failed or they left traces all the same."""
        accept_so_far(self.folder)
        ends = self._ends()
        if ends.failed or any(record.trace for record in ends.records):
            self._failed()
        else:
            self.stays()

    def see_that_some_took_part(self, began: float, status: int) -> None:
        """Refuse a launcher none of whose processes has left a run record (``E319``).

        Args:
            began: When it was started, seconds since the epoch.
            status: Its exit status; what it has failed with itself comes first.
        """
        records = [
            record
            for folder in filter(None, (self.folder, self.takes_place_of))
            for record in (*folder.glob("run-rank*.json"), *folder.glob("so-far-rank*.json"))
        ]
        if any(record.stat().st_mtime >= began - 1 for record in records):
            return
        error = RunError(
            "E319",
            "No script that the launcher started took part.",
            why="either it ran none with Python, or its Python is another than the one that "
            "recompute-scan is installed in",
            hint="install recompute-scan where the script runs, or start it there: "
            "torchrun … -m recompute_scan run train.py",
        )
        if status == 0:
            raise error
        self.tell(f"recompute-scan: {error}")

    def result(self, info: RunInfo) -> Result | None:
        """What the run's traces show; ``None`` where a failed script left nothing to tell.

        Raises:
            RunError: There is no trace although the script ended well (``E309``).
        """
        ends = self._ends()
        seen = any(one.trace or one.fidelity for one in (info, *ends.records))
        if not seen and not ends.failed:
            error = RunError("E309", "The run gave no trace.", why=info.message)
            # A bug of ours is no failure of the script.
            if info.exit_status == 0 and info.bug is None:
                raise error
            self.tell(f"recompute-scan: {error}")
            self.stays()
            return None
        return self._analysed()

    def _run(self, info: RunInfo) -> None:
        folder = self.folder
        if info.world_size > 1:
            there = wait_for_ranks(folder, info.world_size, _RANKS_TIMEOUT_S)
            if missing := sorted(set(range(info.world_size)) - set(there)):
                self.tell(
                    f"recompute-scan: no run record from ranks {missing}; reporting on the others"
                )
                accept_so_far(folder)
        if self._ends().failed:  # another rank failed, and not this one
            self.failure()
            return
        result = self.result(info)
        if result is not None:
            self.write(result)
            self.came_through(result, info.exit_status)

    def _failed(self) -> None:
        accept_so_far(self.folder)
        result = self._analysed()
        try:
            write_report(self.folder, result)
        finally:  # a full disk keeps nobody from reading it here
            self.show(self.folder, result, ())
            self.stays()

    def _ends(self) -> Ends:
        from recompute_scan.analysis.ranks import ends_in  # noqa: PLC0415

        return ends_in([self.folder])

    def _analysed(self) -> Result:
        from recompute_scan.analysis.pipeline import analyse  # noqa: PLC0415

        return analyse([self.folder], self.progress, machine=self.machine)

    def write(self, result: Result) -> None:
        """Write the result and its page."""
        try:
            write_report(self.folder, result)
        except ScanError:
            self.show(self.folder, result, self.after)  # a full disk keeps nobody from reading it
            raise

    def came_through(self, result: Result, status: int) -> None:
        """The result is written: it takes the place of an earlier one, unless the script failed or
        was interrupted, and is shown.
        """
        folder = self.folder
        try:
            if self.takes_place_of is not None and status == 0:
                take_place(folder, self.takes_place_of)
                folder = self.takes_place_of
        finally:
            self.show(folder, result, self.after)
            self.stays()

    def stays(self) -> None:
        """There is no new result: an earlier one stays, and it is said where this run's is."""
        if self.takes_place_of is None or self.launched or not self.folder.exists():
            return
        with suppress(OSError):
            self.folder.rmdir()  # of a run that has left nothing
            return
        self.tell(
            f"recompute-scan: {self.takes_place_of} keeps the result of an earlier run; what this "
            f"one left is in {self.folder}"
        )


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
