"""Many ranks in few rows: those whose answers are alike stand together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median

from recompute_scan.report.groups import ranges
from recompute_scan.result import Rank, Result, Verdict
from recompute_scan.units import UNKNOWN, ms, plural

# From here on the rows of single ranks are folded away under those of their groups.
MANY_RANKS = 16
MOST_RANKS = 2048


@dataclass(frozen=True)
class RankGroup:
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


def rank_words(result: Result) -> str:
    """``3 doubled, 1 full``: the ranks' own verdicts, the commonest first."""
    counts = Counter(rank.verdict for rank in result.ranks)
    return ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common())


def ranks_sentence(result: Result) -> str | None:
    """How many ranks there are, whether they agree, and whose numbers the page shows.

    ``None`` for a single rank. The result is that of the first rank with the worst verdict.
    """
    if len(result.ranks) < 2:
        return None
    number = plural(len(result.ranks), "rank")
    shown = next((r.rank for r in result.ranks if r.verdict == result.verdict), None)
    whose = "" if shown is None else f" The numbers of this page are those of rank {shown}"
    if len({rank.verdict for rank in result.ranks}) == 1:
        said = f"{number}, all {result.ranks[0].verdict}."
        return said + (f"{whose}." if whose else "")
    said = f"{number} that differ: {rank_words(result)}."
    return said + (f"{whose}, the first with the worst verdict." if whose else "")
