"""Rank by rank: many ranks in few rows, those whose answers are alike together."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from msgspec import Struct

from recompute_scan.report.groups import ranges
from recompute_scan.report.section import Section, analysed
from recompute_scan.report.summary import ranks_sentence
from recompute_scan.result import Rank, Result, Verdict
from recompute_scan.units import UNKNOWN, ms

# From here on the rows of single ranks are folded away under those of their groups.
MANY_RANKS = 16
MOST_RANKS = 2048


class RankGroup(Struct, frozen=True):
    """Ranks with the same verdict and the same number of recomputes a block."""

    verdict: Verdict
    recomputes: float | None
    ranks: tuple[Rank, ...]

    @property
    def numbers(self) -> str:
        """``0-3, 8``."""
        return ranges(sorted(rank.rank for rank in self.ranks))

    @property
    def step(self) -> str:
        """The median step, and the shortest and longest where there are several."""
        times = [rank.step_ms for rank in self.ranks if rank.step_ms is not None]
        if not times:
            return UNKNOWN
        if len(times) == 1:
            return ms(times[0])
        return f"{ms(median(times))} ({ms(min(times))} to {ms(max(times))})"


def rank_groups(result: Result) -> tuple[RankGroup, ...]:
    """The groups, in order of their first rank."""
    groups: dict[tuple[Verdict, float | None], list[Rank]] = {}
    for rank in result.ranks:
        recomputes = rank.recomputes_per_block
        key = (rank.verdict, None if recomputes is None else round(recomputes, 2))
        groups.setdefault(key, []).append(rank)
    return tuple(
        RankGroup(verdict, recomputes, tuple(ranks))
        for (verdict, recomputes), ranks in groups.items()
    )


def _html(result: Result) -> Mapping[str, Any]:
    return {
        "groups": rank_groups(result),
        "sentence": ranks_sentence(result),
        "many_ranks": MANY_RANKS,
        "most_ranks": MOST_RANKS,
    }


SECTION = Section(
    anchor="ranks",
    title="Rank by rank",
    template="rank_by_rank.html",
    present=lambda result: analysed(result) and len(result.ranks) > 1,
    html=_html,
    link="Ranks",
)
