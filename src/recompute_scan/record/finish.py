"""The end of a run: result.json, report.html and the next commands.

The analysis is imported when the script has ended, which would find it among its modules.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from time import monotonic, sleep, time
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.cost.flops import UNKNOWN_MACHINE, Machine
from recompute_scan.errors import RunError, ScanError, UsageError
from recompute_scan.record.children import record, run_trial
from recompute_scan.record.launch import launch, launch_with, rank_facts, wait_for_ranks
from recompute_scan.record.options import (
    RunOptions,
    came_to_an_end,
    encode,
    take_place,
    write_report,
)
from recompute_scan.record.shutdown import ends_with, on_sigterm
from recompute_scan.record.steps import chosen
from recompute_scan.result.run_record import (
    CLAIM,
    NextCommand,
    RunInfo,
    accept_so_far,
    read_run_info,
    run_info_name,
)

if TYPE_CHECKING:
    from recompute_scan.analysis.ranks import Ends
    from recompute_scan.record.verify import Asked
    from recompute_scan.result import Result


# How long rank 0 waits for the other ranks' run records after its own script has ended.
_RANKS_TIMEOUT_S = 120.0
# How long a rank that failed too waits for the report of another.
_REPORT_TIMEOUT_S = 120.0
_POLL_S = 0.1


class Reporting(Struct, frozen=True):
    """Reports on the run in one folder.

    Attributes:
        takes_place_of: The folder of an earlier result, as in
            :class:`~recompute_scan.record.options.RunOptions`.
        machine: What a person says of the device.
        after: The commands that come next; ``None`` where only the result names some.
        arguments: How commands end that give the script its arguments. Files leave them
            out: they may hold secrets.
        root: Where the recording began.
        launched: Whether a process of ours started the ranks, and reports when all have ended.
        show: Gets the folder, a result and the commands that come next.
        leaving: Gets the exit status where the process is about to end behind everyone's back.
    """

    folder: Path
    machine: Machine
    after: tuple[NextCommand, ...] | None
    launched: bool
    show: Callable[[Path, Result, Sequence[NextCommand] | None], None]
    print_line: Callable[[str], None]
    progress: Callable[[str], None]
    leaving: Callable[[int], None] = lambda _: None
    takes_place_of: Path | None = None
    arguments: str = ""
    root: Path | None = None

    def conclude(self, info: RunInfo, *, at_once: bool = False) -> None:
        """This rank's run is over: report on it, where that is this rank's to do.

        With ``at_once`` no caller is left to catch an error.

        Raises:
            ScanError: There can be no report of a script that succeeded.
            OSError: It cannot be written or shown.
        """
        try:
            if info.end is not None:
                self.failure()
            elif info.rank == 0 and not (self.launched and info.exit_status and info.counted):
                self._run(info)
        except BrokenPipeError:
            raise
        except (ScanError, OSError) as error:
            if not (at_once or info.exit_status):
                raise
            # A script that failed keeps its exit status.
            told = str(error) if isinstance(error, ScanError) else f"no report: {error.strerror}"
            self.print_line(f"recompute-scan: {told}")
            self.stays()

    def conclude_at_once(self, info: RunInfo) -> None:
        """The same where no caller is left to catch an error."""
        try:
            self.conclude(info, at_once=True)
        finally:
            self.leaving(info.exit_status)

    def failure(self) -> None:
        """Report on a run in which this rank, or another, failed; one rank reports for all.

        The first that fails does it at once, since a launcher ends the others when one ends. Under
        our own launcher none does: it reports when all have ended (:meth:`failed_ranks`).
        """
        if self.launched:
            return
        claim = self.folder / CLAIM
        try:
            claim.touch(exist_ok=False)
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
        if ends.failed or any(record.trace or record.counted for record in ends.records):
            self._failed()
        else:
            self.stays()

    def see_that_some_took_part(self, began: float, status: int) -> None:
        """Refuse a launcher if no process that it started has left a run record (``E319``).

        Args:
            began: When it was started, seconds since the epoch.
            status: Its exit status; where that is not 0, the error is only printed.
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
            "No script that the launcher started was recorded.",
            why="either it ran none with Python, or its Python is another than the one that "
            "recompute-scan is installed in",
            hint="install recompute-scan where the script runs, or start it there: "
            "torchrun … -m recompute_scan run train.py",
        )
        if status == 0:
            raise error
        self.print_line(f"recompute-scan: {error}")

    def result(self, info: RunInfo) -> Result | None:
        """The result of the run's traces; ``None`` where a failed script left nothing to report.

        Raises:
            RunError: There is no trace although the script ended well (``E309``).
        """
        ends = self._ends()
        seen = any(one.trace or one.fidelity or one.counted for one in (info, *ends.records))
        if not seen and not ends.failed:
            error = RunError("E309", "The run gave no trace.", why=info.message)
            # A bug of ours is no failure of the script.
            if info.exit_status == 0 and info.bug is None:
                raise error
            self.print_line(f"recompute-scan: {error}")
            self.stays()
            return None
        return self._analysed()

    def _run(self, info: RunInfo) -> None:
        if info.world_size > 1:
            there = wait_for_ranks(self.folder, info.world_size, _RANKS_TIMEOUT_S)
            if missing := sorted(set(range(info.world_size)) - set(there)):
                self.print_line(
                    f"recompute-scan: no run record from ranks {missing}; reporting on the others"
                )
                accept_so_far(self.folder)
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
            self._store(result)
            came_to_an_end(self.takes_place_of or self.folder, well=False)
        finally:  # also where the disk is full
            self.show(self.folder, result, None)
            self.stays()

    def _ends(self) -> Ends:
        from recompute_scan.analysis.ranks import ends_in  # noqa: PLC0415

        return ends_in([self.folder])

    def _analysed(self) -> Result:
        from recompute_scan.analysis.pipeline import analyse  # noqa: PLC0415

        return analyse([self.folder], self.progress, machine=self.machine)

    def write(self, result: Result) -> None:
        try:
            self._store(result)
        except ScanError:
            self.show(self.folder, result, self.after)  # also where the disk is full
            raise

    def _store(self, result: Result) -> None:
        after = self.after and [
            replace(one, text=one.text.removesuffix(self.arguments)) for one in self.after
        ]
        place = self.takes_place_of or self.folder
        write_report(self.folder, result, after, root=self.root, place=place)

    def came_through(self, result: Result, status: int) -> None:
        """The result is written: it takes the place of an earlier one, unless the script failed or
        was interrupted, and is shown.
        """
        folder = self.folder
        try:
            if self.takes_place_of is not None and status == 0:
                take_place(folder, self.takes_place_of)
                folder = self.takes_place_of
            came_to_an_end(self.takes_place_of or folder, well=status == 0)
        finally:
            self.show(folder, result, self.after)
            self.stays()

    def stays(self) -> None:
        """There is no new result: an earlier one stays; print where this run's files are."""
        if self.takes_place_of is None or self.launched or not self.folder.exists():
            return
        with suppress(OSError):
            self.folder.rmdir()  # of a run that has left nothing
            return
        self.print_line(
            f"recompute-scan: {self.takes_place_of} keeps the result of an earlier run; the "
            f"files of this one are in {self.folder}"
        )


def _deaf_to_sigterm() -> AbstractContextManager[None]:
    if threading.current_thread() is not threading.main_thread():
        return nullcontext()  # the watchdog's: only the main thread may choose, and it hangs
    return on_sigterm(signal.SIG_IGN)


def _wait_for_report(claim: Path) -> None:
    deadline = monotonic() + _REPORT_TIMEOUT_S
    with suppress(OSError):
        while claim.stat().st_size == 0 and monotonic() < deadline:
            sleep(_POLL_S)


class Way(Struct, frozen=True):
    """How a script is started.

    Attributes:
        launcher: Path of the launcher that starts it; ``None`` without one.
        nproc_per_node: Processes to start with torchrun's launcher; ``None`` for this one.
        verify: Whether to measure the fix too.
        without_checkpointing: Whether to measure it without any checkpoint too.
    """

    launcher: str | None = None
    nproc_per_node: int | None = None
    verify: bool = False
    without_checkpointing: bool = False

    def check(self, options: RunOptions) -> None:
        """Refuse what does not go together, before anything is written.

        Raises:
            UsageError: ``E207``, ``E220``, ``E223`` or ``E224``.
        """
        number, ranks = self.nproc_per_node, options.ranks
        if self.launcher is not None and (self.verify or number is not None or options.is_module):
            raise UsageError(
                "E223",
                f"{options.target} starts the processes itself: --verify, --nproc-per-node and -m "
                "are for a script that recompute-scan starts.",
                hint="leave the launcher out and give --nproc-per-node, or leave the option out",
            )
        if number is not None and number < 1:
            raise UsageError("E207", f"--nproc-per-node {number} starts no process.")
        if not chosen(ranks, number or 1) and number is not None:
            raise UsageError("E224", f"--ranks {ranks} names no rank of {number} processes.")
        if self.without_checkpointing and not self.verify:
            raise UsageError(
                "E220", "--without-checkpointing measures only together with --verify."
            )


class Handed(Struct, frozen=True):
    """Settings that a process below a launcher gets from the one that started the launcher.

    It adds the target and its arguments to the options.
    """

    options: RunOptions
    machine: Machine = UNKNOWN_MACHINE
    after: tuple[NextCommand, ...] | None = None


def run_and_report(
    way: Way,
    options: RunOptions,
    reporting: Reporting,
    flags: Sequence[str] = (),
    plan: Asked | None = None,
) -> int:
    """Exit status of the script, run one way and reported on, and planned for where that is asked.

    ``flags`` are what else the processes that are started are given.

    Raises:
        UsageError: It cannot be started several times (``E221``), or times no steps (``E222``).
        RunError: There is no plan (``E331``, ``E332`` or ``E333``).
    """
    try:
        if way.verify or plan is not None:
            return _run_and_more(way, options, reporting, plan)
        return _run(way, options, reporting, flags)
    except ScanError as error:
        ends_with(error.exit_status)
        reporting.stays()
        raise


def _run(way: Way, options: RunOptions, reporting: Reporting, flags: Sequence[str]) -> int:
    if way.launcher is None and way.nproc_per_node is None:
        info = record(options, reporting.conclude_at_once)
        reporting.conclude(info)
        return info.exit_status
    handed = encode(Handed(replace(options, args=()), reporting.machine, reporting.after))
    if way.launcher is not None:
        began = time()
        status = launch_with([way.launcher, *options.args], handed)
        reporting.see_that_some_took_part(began, status)
    else:
        assert way.nproc_per_node is not None
        target = ["-m"] * options.is_module + [options.target, *options.args]
        status = launch(way.nproc_per_node, ["run", "--handed-on", handed, *flags, *target])
    if status:
        reporting.failed_ranks()
    return status


def _run_and_more(way: Way, options: RunOptions, reporting: Reporting, plan: Asked | None) -> int:
    """Record in new processes, report, then plan or measure with the fix, and report again."""
    what = "--verify" if plan is None else "plan"
    if rank_facts().world_size > 1:
        raise UsageError(
            "E221",
            f"{what} starts the script several times, and this is one of several processes.",
            hint="leave torchrun out, and give --nproc-per-node to recompute-scan",
        )
    if options.timing_steps < 1:
        raise UsageError("E222", f"{what} compares timed steps, and --timing-steps 0 times none.")
    status = run_trial(options, way.nproc_per_node, None)
    run_record = options.output / run_info_name(0)
    if status == UsageError.exit_status and not run_record.exists():
        reporting.stays()
        return status  # it has printed why
    info = read_run_info(run_record)
    result = reporting.result(info)
    if result is None:
        return info.exit_status
    reporting.write(result)  # whatever comes after, this is not lost
    if info.exit_status == 0:
        # It brings the analysis, which no script that is recorded here is to find imported.
        from recompute_scan.record.verify import add_plan, verify  # noqa: PLC0415

        alike, number = replace(options, events=""), way.nproc_per_node
        if plan is not None:
            result = add_plan(result, alike, number, plan, reporting.progress)
        else:
            without, progress = way.without_checkpointing, reporting.progress
            result = verify(
                result, alike, number, without_checkpointing=without, on_progress=progress
            )
        reporting.write(result)
    reporting.came_through(result, info.exit_status)
    return info.exit_status
