"""``run --guard``: the whole training of an unchanged script, and what has changed in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recompute_scan.cli.followed import followed_at, told_change
from recompute_scan.cli.output import tell


def run_guarded_script(
    script: str,
    args: Sequence[str],
    folder: Path,
    is_module: bool,
    nproc_per_node: int | None,
) -> int:
    """The script's exit status; what was told is in the folder."""
    folder = folder.absolute()
    if nproc_per_node is not None:
        from recompute_scan.record.launch.launcher import launch

        events = ["--events", followed_at()] if followed_at() else []
        target = ["-m"] * is_module + [script, *args]
        return launch(nproc_per_node, ["run", "--guard", *events, "-o", str(folder), *target])
    from recompute_scan.guarding.running import run_guarded

    standing, ended = run_guarded(
        script, is_module, args, folder, [told_change] if followed_at() else []
    )
    if standing is None:  # why is said already
        return ended.exit_status
    changes = len(standing.changes)
    said = "nothing changed" if not changes else f"{changes} change{'s' * (changes > 1)} told above"
    if not standing.stored.modules:
        said = "nothing was recomputed"
    tell(f"{standing.steps} steps guarded: {said}")
    for change in standing.changes:
        tell(change.text)
    return ended.exit_status
