"""The folder that a recording goes to: what can be said against it before anything runs, and what
it holds once all is analysed.

A run that fails replaces no result of one that succeeded: where the folder holds one, a run
records beside it, and what it left takes the place of the earlier once there is a new result.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from recompute_scan.errors import UsageError
from recompute_scan.files import write
from recompute_scan.record.launch.launcher import rank_facts
from recompute_scan.record.scope import Plan
from recompute_scan.run_info import (
    CLAIM,
    STOPPED,
    WORD,
    compiled_name,
    run_info_name,
    so_far_name,
    stacks_text_name,
)

if TYPE_CHECKING:
    from recompute_scan.result import Result


# What ranks leave there, and the folders of further runs.
_KINDS = (
    *("trace", "stacks", "flight", "compiled", "where", "run", "so-far"),
    *("gradients", "rehearsal"),
)
_BELOW = ("verify", "plan")


def check_plan(plan: Plan, *, measuring: bool = False) -> None:
    """Refuse impossible step counts (``E204``); who measures steps, or compares one, may do
    without profiled ones.
    """
    fewest = 0 if plan.only_compares or (measuring and plan.timing) else 1
    if plan.steps < fewest or plan.warmup < 1 or plan.timing < 0:
        raise UsageError(
            "E204",
            "At least 1 warm-up step and 1 profiled step are needed, and no fewer than 0 timed.",
        )


def check_device(device: Literal["auto", "cpu", "cuda"]) -> None:
    """Refuse to record a GPU where there is none (``E205``)."""
    # Counted without starting CUDA, which would break a script that forks later.
    if device == "cuda" and torch.cuda.device_count() == 0:
        raise UsageError(
            "E205",
            "There is no GPU that torch can use here.",
            hint="cpu as the device records the CPU; auto takes what the script uses",
        )


def prepare(folder: Path) -> None:
    """Make the folder, and take out what an earlier recording left there.

    Raises:
        UsageError: It cannot be written (``E206``).
    """
    facts = rank_facts()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # What an earlier run left must not pass for this one's.
        _take_out(folder, _files(facts.rank))
        if facts.rank == 0:
            _take_out(folder, (CLAIM, STOPPED, WORD))
            if _result_in(folder) is None:
                _take_out(folder, ("result.json", "report.html"))
            rank = facts.world_size
            while any((folder / name).exists() for name in _run_records(rank)):
                _take_out(folder, _files(rank))
                rank += 1
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, os.strerror(13))
    except OSError as error:
        raise cannot_write(folder, error) from None


def beside(folder: Path, *, plans: bool = False) -> tuple[Path, Path | None]:
    """Where to record, and the folder whose place that takes at the end; ``None`` where it is
    that folder.

    It is the folder itself unless a result is in it, else a sibling with ``-failed`` behind its
    name, which it keeps if there is no new result. Where there can be none, such as above a volume,
    it is a folder inside. A plan replaces plans only; its folder has ``-plan`` behind its name.

    Args:
        folder: What was asked for, absolute.
        plans: Whether a plan is to come of it.
    """
    earlier = _result_in(folder)
    if earlier is not None and plans and earlier.get("plan") is None:
        folder = _named(folder, "plan")
        earlier = _result_in(folder)
    if earlier is None:
        return folder, None
    number, place = 1, _named(folder, "failed")
    while _result_in(place) is not None:
        number += 1
        place = _named(folder, f"failed-{number}")
    return place, folder


def _named(folder: Path, ending: str) -> Path:
    above = folder.parent
    try:
        near = above.stat().st_dev == folder.stat().st_dev and os.access(above, os.W_OK)
    except OSError:
        near = False
    near = near and folder.name not in ("", "..") and not folder.is_symlink()
    return folder.with_name(f"{folder.name}-{ending}") if near else folder / ending


def _result_in(folder: Path) -> dict[str, Any] | None:
    """The result of a run that succeeded; ``None`` where there is none."""
    try:
        if not (folder / "result.json").is_file():
            return None
        found = msgspec.json.decode((folder / "result.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}  # cut off, or somebody else's: not ours to replace
    found = found if isinstance(found, dict) else {}
    return None if found.get("crash") is not None else found


def take_place(recorded: Path, folder: Path) -> None:
    """There is a new result: what was recorded beside the folder takes the place of what an earlier
    run has left in it.

    Raises:
        UsageError: It cannot be written (``E206``).
    """
    try:
        for kind in _KINDS:
            for one in folder.glob(f"{kind}-rank*"):
                one.unlink()
        for name in _BELOW:
            if (folder / name).is_symlink():
                (folder / name).unlink()
            shutil.rmtree(folder / name, ignore_errors=True)
        for one in recorded.iterdir():
            one.replace(folder / one.name)
        recorded.rmdir()
    except OSError as error:
        raise cannot_write(folder, error) from None


def cannot_write(folder: Path, error: OSError) -> UsageError:
    """The error for a folder that cannot be written (``E206``)."""
    return UsageError("E206", f"Cannot write to the output folder {folder}.", why=error.strerror)


def write_report(folder: Path, result: Result) -> None:
    """Write the result and its page into the run's folder, over what an earlier one left."""
    from recompute_scan.report.html import render_html  # noqa: PLC0415 - after the run, not before
    from recompute_scan.result import to_json  # noqa: PLC0415

    write(folder / "result.json", to_json(result), force=True)
    write(folder / "report.html", render_html(result), force=True)


def _take_out(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)


def _run_records(rank: int) -> tuple[str, ...]:
    return run_info_name(rank), so_far_name(rank)


def _files(rank: int) -> tuple[str, ...]:
    return (
        f"trace-rank{rank}.json.gz",
        f"stacks-rank{rank}.json.gz",
        f"flight-rank{rank}.json",
        compiled_name(rank),
        stacks_text_name(rank),
        *_run_records(rank),
    )
