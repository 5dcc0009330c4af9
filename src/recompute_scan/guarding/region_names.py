"""What regions are called, and what each module did in a step, by its name."""

from __future__ import annotations

from collections.abc import Sequence

from recompute_scan.guarding.changes import WatchedPart
from recompute_scan.guarding.judging import SeenStep
from recompute_scan.guarding.tallies import TalliedRegion
from recompute_scan.record.module_names import ModuleIndex

# Searches for the names of modules; scripts that make models without end get names by class.
_SEARCHES = 50


class RegionNames:
    """Gives names to regions that were recomputed for the first time."""

    def __init__(self, index: ModuleIndex) -> None:
        self._index = index
        self._searches = 0

    def give(self, regions: Sequence[TalliedRegion]) -> None:
        """Name what has no name yet: qualified names, or function and line."""
        new = [one for one in regions if one.name is None and one.recomputed]
        if not new:
            return
        if self._searches < _SEARCHES:
            self._searches += 1
            self._index.rebuild()
        for region in new:
            module = region.module
            if module is None:
                at = f" ({region.site})" if region.site else ""
                region.name = f"{region.function}{at}"
            else:
                found = self._index.look_up([module])
                region.name = found.name or found.class_name


def seen_step(regions: Sequence[TalliedRegion]) -> dict[str, SeenStep]:
    """What each module did in the step that has ended, by its name."""
    parts: dict[str, list[WatchedPart]] = {}
    sites: dict[str, list[str]] = {}
    for region in regions:
        if region.name is None or not region.entered + region.recomputed:
            continue
        mine, at = parts.setdefault(region.name, []), sites.setdefault(region.name, [])
        if region.runs_again:
            mine.append(
                WatchedPart(
                    region.variant,
                    bool(region.keeps_random),
                    region.nested > 0,
                    region.again > 0,
                )
            )
            if region.site:
                at.append(region.site)
    return {name: SeenStep(tuple(sorted(mine)), tuple(sites[name])) for name, mine in parts.items()}
