"""The ways to run a script: here, in several processes, below a launcher, or several times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.cost.peaks import UNKNOWN_MACHINE, Machine
from recompute_scan.errors import ScanError, UsageError
from recompute_scan.record.launch.launcher import launch, launch_with, rank_facts
from recompute_scan.record.launch.runner import record
from recompute_scan.record.reporting import Reporting
from recompute_scan.record.run_folder import write_report
from recompute_scan.record.run_options import RunOptions, encode
from recompute_scan.record.scope import chosen
from recompute_scan.record.stopping import ends_with
from recompute_scan.record.verify.trial import run_trial
from recompute_scan.run_info import NextCommand, read_run_info, run_info_name

if TYPE_CHECKING:
    from recompute_scan.record.arrange.proving import Asked
    from recompute_scan.result import Result


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
            raise UsageError("E224", f"--ranks {ranks} names none of {number} processes.")
        if self.without_checkpointing and not self.verify:
            raise UsageError(
                "E220", "--without-checkpointing measures only together with --verify."
            )


class Handed(Struct, frozen=True):
    """What a process below a launcher is told by the one that started the launcher.

    Attributes:
        options: What to record; the target and its arguments are the process's own.
        machine: What a person says of the device.
        after: The commands that come next, for whoever reports.
    """

    options: RunOptions
    machine: Machine = UNKNOWN_MACHINE
    after: tuple[NextCommand, ...] = ()


def run_and_report(
    way: Way, options: RunOptions, reporting: Reporting, flags: Sequence[str] = ()
) -> int:
    """Exit status of the script, run one way and reported on.

    Args:
        way: How to start it.
        options: What to record.
        reporting: Reports on it.
        flags: What else the processes that are started are given.
    """
    try:
        if way.verify:
            return _verify(way, options, reporting)
        return _run(way, options, reporting, flags)
    except ScanError as error:
        ends_with(error.exit_status)
        reporting.stays()
        raise


def _run(way: Way, options: RunOptions, reporting: Reporting, flags: Sequence[str]) -> int:
    if way.launcher is None and way.nproc_per_node is None:
        info = record(
            options,
            on_hang=reporting.hung,
            on_exit=reporting.conclude_at_once,
        )
        reporting.conclude(info)
        return info.exit_status
    handed = encode(Handed(replace(options, args=()), reporting.machine, tuple(reporting.after)))
    if way.launcher is not None:
        began = time.time()
        status = launch_with([way.launcher, *options.args], handed)
        reporting.see_that_some_took_part(began, status)
    else:
        assert way.nproc_per_node is not None
        target = ["-m"] * options.is_module + [options.target, *options.args]
        status = launch(way.nproc_per_node, ["run", "--handed-on", handed, *flags, *target])
    if status:
        reporting.failed_ranks()
    return status


def _verify(way: Way, options: RunOptions, reporting: Reporting) -> int:
    """Record in processes of their own, report, then measure with the fix and report again."""
    # It brings the analysis, which no script that is recorded here is to find imported.
    from recompute_scan.record.verify.rounds import verify  # noqa: PLC0415

    def measured(result: Result) -> Result:
        return verify(
            result,
            replace(options, events=""),
            way.nproc_per_node,
            without_checkpointing=way.without_checkpointing,
            on_progress=reporting.progress,
        )

    return _and_more("--verify", measured, way, options, reporting)


def plan_and_report(way: Way, options: RunOptions, reporting: Reporting, asked: Asked) -> int:
    """Exit status of the script, recorded, rehearsed and planned for.

    Args:
        way: How to start it.
        options: What to record.
        reporting: Reports on it.
        asked: What is wanted of the plan.

    Raises:
        UsageError: It cannot be started several times (``E221``), or times no steps (``E222``).
        RunError: There is no plan (``E331``, ``E332`` or ``E333``).
    """
    from recompute_scan.record.arrange.proving import add_plan  # noqa: PLC0415 - as above

    def planned(result: Result) -> Result:
        return add_plan(
            result, replace(options, events=""), way.nproc_per_node, asked, reporting.progress
        )

    try:
        return _and_more("plan", planned, way, options, reporting)
    except ScanError:
        reporting.stays()
        raise


def _and_more(
    what: str,
    more: Callable[[Result], Result],
    way: Way,
    options: RunOptions,
    reporting: Reporting,
) -> int:
    """Record in processes of their own, report, then find out more and report again."""
    if rank_facts().world_size > 1:
        raise UsageError(
            "E221",
            f"{what} starts the script several times, and this is one of several processes.",
            hint="leave torchrun out, and give --nproc-per-node to recompute-scan",
        )
    if options.timing_steps < 1:
        raise UsageError("E222", f"{what} compares timed steps, and --timing-steps 0 times none.")
    folder = options.output
    status = run_trial(options, way.nproc_per_node, None)
    run_record = folder / run_info_name(0)
    if status == UsageError.exit_status and not run_record.exists():
        reporting.stays()
        return status  # it has said why
    info = read_run_info(run_record)
    result = reporting.result(info)
    if result is None:
        return info.exit_status
    write_report(folder, result)  # whatever comes after, this is not lost
    if info.exit_status == 0:
        result = more(result)
        write_report(folder, result)
    reporting.came_through(result, info.exit_status)
    return info.exit_status
