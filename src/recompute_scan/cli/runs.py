"""``recompute-scan runs``: earlier runs, listed and removed."""

from __future__ import annotations

from pathlib import Path

import click

from recompute_scan.cli.output import debug_option, files, say
from recompute_scan.errors import InputError, UsageError
from recompute_scan.terminal import inert


@click.command(short_help="List earlier runs, or remove some.")
@click.argument("folders", nargs=-1, shell_complete=files)
@click.option("--remove", is_flag=True, help="Remove the runs in FOLDERS, folder and all.")
@debug_option
def runs(folders: tuple[str, ...], remove: bool) -> int:
    """List the runs below recompute-scan-out, oldest first, or those in FOLDERS alone.

    Each has its verdict, or how it failed; `latest` is the one that the folder above it stands for.
    FOLDERS are those of runs, or of scripts, for all of their runs.
    """
    from recompute_scan.run_folders import all_runs, newest_run
    from recompute_scan.run_folders import remove as remove_run

    wanted = {Path(one).absolute() for one in folders}
    chosen = [
        one for one in all_runs() if not wanted or {one.absolute(), one.absolute().parent} & wanted
    ]
    if (not chosen and folders) or (remove and not folders):
        raise UsageError(
            "E242",
            f"There is no run in {', '.join(folders)}."
            if folders
            else "No run to remove is named.",
            why="runs are below recompute-scan-out",
            hint="recompute-scan runs lists them",
        )
    for run in chosen:
        mark = "  latest" * (newest_run(str(run.parent)) == str(run))
        said = f"removed {run}" if remove else f"{run}  {_outcome(run)}{mark}"
        if remove:
            remove_run(run)
        say(f"{inert(said)}\n")
    return 0


def _outcome(run: Path) -> str:
    """The run's verdict, or how it failed, in a word."""
    from recompute_scan.analysis.pipeline import written_result
    from recompute_scan.report.summary import shortest_answer

    try:
        result = written_result(run / "result.json")
    except InputError:
        return "not readable"
    return shortest_answer(result) if result else "no result"
