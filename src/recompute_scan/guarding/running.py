"""``run --guard``: an unchanged script's whole training under the guard, to its own end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from recompute_scan.files import write_whole
from recompute_scan.guarding.changes import Change
from recompute_scan.guarding.standing import StandingGuard, guard
from recompute_scan.record.execute import Exit, run_program
from recompute_scan.record.launch.launcher import rank_facts
from recompute_scan.record.run_folder import cannot_write

FORMAT = "recompute-scan-guarded/1"


def run_guarded(
    target: str, is_module: bool, args: Sequence[str], folder: Path
) -> tuple[StandingGuard, Exit]:
    """The guard of a whole run, and how the script ended.

    What is usual is kept in ``guard-rankN.json`` of the folder: the next run there is compared with
    this one from its first step on. What was told is in ``guarded-rankN.json``.

    Raises:
        UsageError: No such script (``E202``) or module (``E203``), or a folder that cannot be
            written (``E206``).
        InputError: The folder's baseline cannot be read (``E351``).
    """
    folder = folder.absolute()  # the script may change the current directory
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from None
    rank = rank_facts().rank
    standing = guard(baseline=folder / f"guard-rank{rank}.json")
    standing.start()
    try:
        ended = run_program(target, is_module, args)
    finally:
        failure = standing.failure
        standing.stop()
    write_told(folder / f"guarded-rank{rank}.json", standing.steps, standing.changes, failure)
    return standing, ended


def write_told(path: Path, steps: int, changes: Sequence[Change], failure: str | None) -> None:
    """What was told, as JSON."""
    told = {
        "format": FORMAT,
        "steps": steps,
        "changes": msgspec.to_builtins(changes),
        "failure": failure,
    }
    write_whole(path, json.dumps(told, indent=2).encode() + b"\n")
