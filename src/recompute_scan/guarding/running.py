"""``run --guard``: an unchanged script's whole training under the guard, to its own end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from recompute_scan.files import write_whole
from recompute_scan.guarding.standing import StandingGuard, guard
from recompute_scan.guarding.telling import Listening
from recompute_scan.record.execute import Exit, run_program
from recompute_scan.record.guard import Guard
from recompute_scan.record.launch.launcher import rank_facts
from recompute_scan.record.run_folder import cannot_write

FORMAT = "recompute-scan-guarded/1"


def run_guarded(
    target: str,
    is_module: bool,
    args: Sequence[str],
    folder: Path,
    callbacks: Sequence[Listening] = (),
) -> tuple[StandingGuard | None, Exit]:
    """The guard of a whole run, and how the script ended; ``None`` where a bug of ours has kept the
    guard from beginning, and the script ran without it.

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
    shelter = Guard()
    standing = shelter.run(partial(_started, folder, callbacks), otherwise=None)
    try:
        ended = run_program(target, is_module, args)
    finally:
        if standing is not None:
            shelter.run(standing.stop, otherwise=None)
    if standing is not None:
        shelter.run(partial(_write_told, folder, standing), otherwise=None)
    return standing, ended


def _started(folder: Path, callbacks: Sequence[Listening]) -> StandingGuard:
    baseline = folder / f"guard-rank{rank_facts().rank}.json"
    return guard(baseline=baseline, callbacks=callbacks).start()


def _write_told(folder: Path, standing: StandingGuard) -> None:
    told = {
        "format": FORMAT,
        "steps": standing.steps,
        "changes": msgspec.to_builtins(standing.changes),
        "failure": standing.failure,
    }
    path = folder / f"guarded-rank{rank_facts().rank}.json"
    write_whole(path, json.dumps(told, indent=2).encode() + b"\n")
