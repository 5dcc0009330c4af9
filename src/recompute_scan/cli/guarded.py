"""``run --guard``: the whole training of an unchanged script, and what has changed in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recompute_scan.cli.followed import followed_at, told_change
from recompute_scan.cli.output import tell
from recompute_scan.units import plural

if TYPE_CHECKING:
    from recompute_scan.guarding.standing import StandingGuard

_TIMES = {1: "once", 2: "twice"}


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
    tell(f"{plural(standing.steps, 'step')} guarded: {_closing(standing)}")
    for change in standing.changes:
        tell(change.text)
    return ended.exit_status


def _closing(standing: StandingGuard) -> str:
    """What changed, and how often blocks are recomputed: a guard that sees no change may have
    seen a training that was doubled from its first step on.
    """
    from recompute_scan.guarding.changes import count

    usual = standing.stored.modules
    if not usual:
        return "nothing was recomputed"
    changes = len(standing.changes)
    said = f"{plural(changes, 'change')}, above and below" if changes else "nothing changed"
    numbers = Counter(count(parts) for parts in usual.values())
    counted = ", ".join(
        f"{plural(blocks, 'block')} recomputed {_TIMES.get(number, f'{number} times')}"
        for number, blocks in sorted(numbers.items())
    )
    said = f"{said}; for each forward, {counted}"
    if max(numbers) > 1:
        said += ". More than once may be waste: recompute-scan run says"
    return said
