"""Folders of runs: one for each run, below one for the script, and which of them is the newest.

    recompute-scan-out/.gitignore
    recompute-scan-out/train/2026-11-26-1/result.json, report.html, …
    recompute-scan-out/train/latest -> 2026-11-26-1

Where links cannot be made, ``latest`` is a file that holds the name.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from datetime import date
from pathlib import Path

from recompute_scan.errors import UsageError
from recompute_scan.files import content, write_whole

HOME = Path("recompute-scan-out")
_LATEST = "latest"
# The day and a number; of processes that some launcher has started, a name for their job.
_OWN = re.compile(r"\d{4}-\d\d-\d\d-(\d{1,6})", re.ASCII)
_RUN = re.compile(rf"{_OWN.pattern}|launched(?:-[\w.-]{{1,130}})?", re.ASCII)


def is_run(folder: Path, *, alone: bool = False) -> bool:
    """Whether a path names a run's folder; ``alone``: one that no other run writes to."""
    name = (_OWN if alone else _RUN).fullmatch(folder.name)
    return bool(name) and folder.parent.parent.name == HOME.name


def newest_run(address: str) -> str:
    """The newest run in a script's folder; anything else stays as it is."""
    mark = Path(address) / _LATEST
    try:
        name = str(mark.readlink()) if mark.is_symlink() else content(mark, 200).decode()
    except (OSError, ValueError):
        return address
    run = mark.with_name(name) if _RUN.fullmatch(name) else mark
    return str(run) if run.is_dir() and not run.is_symlink() else address


def new_run(folder: Path, *, several: bool = False) -> Path:
    """Make a new run's folder, below its script's.

    Args:
        folder: The script's folder.
        several: Whether a launcher of the user's has started this process as one of several. All
            processes of a job get the same folder, as far as the environment identifies the job.

    Raises:
        UsageError: It cannot be made (``E206``).
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(folder.parent / ".gitignore"):
            write_whole(folder.parent / ".gitignore", b"*\n")
        if several:
            return folder / "-".join(["launched", *_job()])
        today = date.today().isoformat()
        there = [_OWN.fullmatch(one.name) for one in folder.glob(f"{today}-*")]
        number = max((int(one[1]) for one in there if one), default=0)
        while True:
            number += 1
            with suppress(FileExistsError):  # made by another run in the meantime
                (folder / f"{today}-{number}").mkdir()
                return folder / f"{today}-{number}"
    except OSError as error:
        what = f"Cannot write to the output folder {folder}."
        raise UsageError("E206", what, why=error.strerror) from None


def _job() -> list[str]:
    """Words that all processes of a job have in common, and no other job as far as possible.

    torchrun and accelerate choose a run id or a free port for each job, unless the user names one.
    Restarts are counted alike everywhere only where one node has all processes.
    """
    names = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "MASTER_PORT")
    words = [os.environ.get(name, "none") for name in names]
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if os.environ.get("GROUP_WORLD_SIZE") == "1" and restarts != "0":
        words.append(restarts)
    return [re.sub(r"[^\w.]", "-", one)[:30] for one in words if one not in ("", "none")]


def remove_if_empty(folder: Path) -> None:
    """Remove the folder of a run that has left nothing."""
    with suppress(OSError):
        folder.rmdir()


def make_newest(run: Path) -> None:
    """Let the script's folder stand for this run."""
    mark = run.with_name(_LATEST)
    partial = run.with_name(f".{_LATEST}-{os.getpid()}")
    with suppress(OSError):
        try:
            partial.symlink_to(run.name)
            partial.replace(mark)
        except OSError:
            partial.unlink(missing_ok=True)
            write_whole(mark, run.name.encode())


def all_runs(home: Path = HOME) -> list[Path]:
    """The folders of runs, by script and time."""
    found = [one for one in home.glob("*/*") if is_run(one) and one.is_dir()]
    own = [one for one in found if not (one.is_symlink() or one.parent.is_symlink())]
    return sorted(own, key=_by_time)


def _by_time(run: Path) -> tuple[str, str, int]:
    own = _OWN.fullmatch(run.name)
    if own is None:
        return run.parent.name, date.fromtimestamp(run.stat().st_mtime).isoformat(), 0
    return run.parent.name, run.name[:10], int(own[1])


def runs_of(script: Path) -> list[Path]:
    """Those of one script's folder."""
    return [one for one in all_runs(script.parent) if one.parent.name == script.name]


def remove(run: Path) -> None:
    """Remove a run's folder; where it was the newest, the one before it takes its place.

    Raises:
        OSError: It cannot be removed.
    """
    was = newest_run(str(run.parent)) == str(run)
    shutil.rmtree(run)
    others = runs_of(run.parent)
    if was and others:
        make_newest(others[-1])
    elif was:
        run.with_name(_LATEST).unlink(missing_ok=True)
