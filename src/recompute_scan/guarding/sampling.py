"""Which call is compared next, so that comparing takes no more than its share of the time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from recompute_scan.guarding.pace import Pace
from recompute_scan.guarding.samples import Sample, can_sample
from recompute_scan.guarding.tallies import TalliedRegion
from recompute_scan.record.guard import Guard
from recompute_scan.record.module_names import ModuleIndex

_FIRST = 3


class Sampling:
    """Takes one region after another, one in a step, some steps apart.

    What a region's first look shows that is kept between calls (statistics that every recompute
    adds to) was so from the beginning, and is told only where it is new.
    """

    def __init__(self, index: ModuleIndex, guard: Guard, every: int, share: float | None) -> None:
        self._index = index
        self._guard = guard
        self._every = every
        self._share = share
        self._next = _FIRST
        self._turn = 0
        self._sample: Sample | None = None
        self._began = 0.0
        self._known: dict[str, tuple[str, ...]] = {}

    def step(
        self, number: int, regions: Sequence[TalliedRegion], pace: Pace
    ) -> tuple[TalliedRegion, list[str]] | None:
        """A step has ended: what the comparison in it has shown that is new."""
        sample, self._sample = self._sample, None
        found = None
        if sample is not None:
            said = sample.end()
            spent = time.perf_counter() - self._began
            self._next = number + self._distance(spent, pace.usual_s)
            if said is not None:
                found = self._judged(sample.region, said)
        elif self._every and number >= self._next and regions and can_sample():
            named = [one for one in regions if one.name is not None and not one.gone]
            if named:
                self._turn += 1
                self._sample = Sample(named[self._turn % len(named)], self._index, self._guard)
                self._began = time.perf_counter()
        return found

    def drop(self) -> None:
        """Compare no more."""
        sample, self._sample = self._sample, None
        self._every = 0
        if sample is not None:
            sample.end()

    def _distance(self, spent: float, usual_s: float | None) -> int:
        if self._share is None or not usual_s:
            return self._every
        extra = max(0.0, spent - usual_s)
        return max(self._every, int(extra / (self._share * usual_s)))

    def _judged(
        self, region: TalliedRegion, said: list[str]
    ) -> tuple[TalliedRegion, list[str]] | None:
        before = self._known.get(region.name or "")
        self._known[region.name or ""] = tuple(said)
        if before is None:
            said = [one for one in said if not one.endswith("is updated again")]
        new = [one for one in said if before is None or one not in before]
        return (region, new) if new else None
