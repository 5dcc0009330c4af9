"""Record the user's script, unchanged: in this process, and in those that it starts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from recompute_scan.record.execute import run_program
from recompute_scan.record.guard import Guard
from recompute_scan.record.launch.children import Children, trained
from recompute_scan.record.observe import observe
from recompute_scan.record.run_folder import check_device, check_plan, prepare
from recompute_scan.record.run_options import RunOptions
from recompute_scan.record.scope import Plan, chosen
from recompute_scan.run_info import RunInfo, accept_so_far, run_records_in


def record(
    options: RunOptions,
    on_hang: Callable[[RunInfo], None] = lambda _: None,
    on_exit: Callable[[RunInfo], None] = lambda _: None,
) -> RunInfo:
    """This rank's run record of the run, as it was also written to ``run-rank<N>.json``.

    Where the script trains only in processes that it starts itself, those leave the run records,
    and what is returned tells how the script ended and how many ranks there are.

    Returns normally whatever the script does: its failure is in ``exit_status`` and ``end``. Only
    a script that hangs cannot be returned from: then the run record is written, ``on_hang`` is
    called with it in another thread, and the process ends with status 124; and one that calls
    ``os._exit``: then ``on_exit`` is called with the run record.

    Raises:
        UsageError: No such script (``E202``) or module (``E203``), impossible step counts
            (``E204``), no GPU although one is asked for (``E205``), an output folder that
            cannot be written (``E206``), or ranks that are none (``E224``).
    """
    chosen(options.ranks, 1)
    plan = Plan(
        warmup=options.warmup,
        timing=options.timing_steps,
        steps=options.steps,
        fidelity=options.fidelity,
    )
    check_plan(plan, measuring=options.measure)
    check_device(options.device)
    folder = options.output.absolute()  # the script may change the current directory
    prepare(folder)
    guard = Guard()
    children = Children(replace(options, output=folder), guard)
    guard.run(children.install, otherwise=None)
    try:
        info = observe(
            options,
            folder,
            partial(run_program, options.target, options.is_module, options.args),
            on_hang=on_hang,
            on_exit=on_exit,
            keep=lambda info: trained(info) or not _records_of_children(folder),
            waits=children.running,
            guard=guard,
            removes=children.remove,
        )
    finally:
        children.remove()
    if trained(info) or info.bug is not None:
        return info
    worlds = [one.world_size for one in _records_of_children(folder)]
    return replace(info, world_size=max([1, *worlds]))


def _records_of_children(folder: Path) -> tuple[RunInfo, ...]:
    accept_so_far(folder)
    return run_records_in(folder)
