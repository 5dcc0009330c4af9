"""Call sites of compiled checkpoints in the words of a recorded run.

Graphs name the line that calls torch's checkpoint, by its whole path. A recorded run knows lines of
the user's own code by shorter names, and where a library's checkpoints were switched on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from recompute_scan.result import Checkpoint, Region
from recompute_scan.run_info import SwitchedOn


def with_call_sites(
    regions: Sequence[Region], known: Collection[str], switched_on: Sequence[SwitchedOn]
) -> tuple[Region, ...]:
    """The regions, with the call sites that a run record has for their compiled checkpoints.

    Args:
        regions: The blocks.
        known: Call sites that the run record knows.
        switched_on: What was switched on, and where.
    """

    def sited(checkpoint: Checkpoint) -> Checkpoint:
        site = checkpoint.call_site
        if site is None or site in known:
            return checkpoint
        switches = {one.site for one in switched_on if one.mechanism == checkpoint.mechanism}
        same = [*switches] or [one for one in known if site.endswith(f"/{one}")]
        return replace(checkpoint, call_site=same[0]) if len(same) == 1 and same[0] else checkpoint

    return tuple(
        replace(region, checkpoints=tuple(map(sited, region.checkpoints))) for region in regions
    )
