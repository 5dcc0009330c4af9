"""One result for all ranks of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from recompute_scan.errors import InputError
from recompute_scan.findings.registry import check_ranks
from recompute_scan.result import Rank, Result, Verdict

# Which rank's answer stands for the run when they differ: the worst.
_SEVERITY: dict[Verdict, int] = {
    "doubled": 4,
    "full": 3,
    "partial": 2,
    "none": 1,
    "inconclusive": 0,
}


@dataclass(frozen=True)
class Piece:
    """The answer for one rank."""

    name: str
    rank: int
    result: Result


def merge(pieces: Sequence[Piece], failures: Sequence[InputError]) -> Result:
    """One result for all ranks: that of the worst, and a row for each.

    Raises:
        InputError: There is no piece; the first failure.
    """
    if not pieces:
        raise failures[0]
    main = worst(pieces)
    unread = tuple(f"Left out: {error.what} {error.why or ''}".strip() for error in failures)
    result = replace(
        main.result,
        ranks=tuple(_rank(piece) for piece in sorted(pieces, key=lambda piece: piece.rank)),
        warnings=main.result.warnings + _rank_warnings(pieces) + unread,
    )
    return check_ranks(result)


def worst(pieces: Sequence[Piece]) -> Piece:
    """The piece whose answer stands for the run."""
    return max(pieces, key=lambda piece: (_SEVERITY[piece.result.verdict], -piece.rank))


def _rank(piece: Piece) -> Rank:
    cost = piece.result.cost
    return Rank(
        rank=piece.rank,
        trace=piece.name,
        verdict=piece.result.verdict,
        step_ms=cost.step_ms if cost else None,
        replays_per_block=_replays_per_block(piece.result),
        recompute_ms=cost.recompute_ms if cost else None,
    )


def _replays_per_block(result: Result) -> float | None:
    if result.verdict == "inconclusive" or not result.regions:
        return None
    return float(np.mean([region.recompute_runs_per_backward for region in result.regions]))


def _rank_warnings(pieces: Sequence[Piece]) -> tuple[str, ...]:
    verdicts = {piece.result.verdict for piece in pieces}
    if len(verdicts) < 2:
        return ()
    said = ", ".join(sorted(verdicts))
    return (f"The ranks differ ({said}); this report shows the worst.",)
