"""How the ranks of a recorded run ended, and one result for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.analysis.confidence import headline
from recompute_scan.crash import RankEnd
from recompute_scan.errors import InputError
from recompute_scan.files import is_file, opened
from recompute_scan.findings.rules import check_ranks
from recompute_scan.result import Checked, Rank, Result, Verdict
from recompute_scan.run_info import RunInfo, run_records_in, stacks_text_name
from recompute_scan.trace import Address

_LONGEST_STACKS = 1 << 20
INTERRUPTED = 130


class Ends(Struct, frozen=True):
    """The run records of a run and the end of every rank that left word, both by rank."""

    records: tuple[RunInfo, ...] = ()
    ranks: tuple[RankEnd, ...] = ()

    @property
    def failed(self) -> bool:
        """Did some rank raise, exit with a failure, hang, or end from outside?

        Not where somebody interrupted the run, and the rest followed from that.
        """
        if all(end.ending == "ended" for end in self.ranks):
            return False
        from recompute_scan.diagnose.outcome import own_failure  # noqa: PLC0415 - most end well

        interrupted = any(one.exit_status == INTERRUPTED for one in self.records)
        return not interrupted or own_failure(self.ranks)

    def with_crash(self, result: Result) -> Result:
        """The result with what is known of the failure, the finding on it first."""
        from recompute_scan.diagnose.outcome import crash_of, findings_of  # noqa: PLC0415 - as above

        findings = findings_of(self.ranks)
        known = {finding.code for finding in findings}
        checked = [Checked(one.code, one.name, "found") for one in findings]
        return replace(
            result,
            crash=crash_of(self.ranks),
            findings=findings + tuple(f for f in result.findings if f.code not in known),
            checked=(*(c for c in result.checked if c.code not in known), *checked),
        )


def ends_in(addresses: Sequence[Address]) -> Ends:
    """The ends of the run in a folder that ``run`` wrote; empty for anything else."""
    if len(addresses) != 1 or not (folder := Path(addresses[0])).is_dir():
        return Ends()
    records = run_records_in(folder)
    world = max((info.world_size for info in records), default=0)
    by_rank = {info.rank: info for info in records}
    ends = [_end(folder, rank, by_rank.get(rank)) for rank in range(world)]
    known = Ends(records, tuple(end for end in ends if end is not None))
    if not known.failed:
        return known
    # In a run that failed, who left nothing did not end well either.
    told = (end or RankEnd(rank=rank, ending="killed") for rank, end in enumerate(ends))
    return Ends(records, tuple(told))


def _end(folder: Path, rank: int, info: RunInfo | None) -> RankEnd | None:
    end = None
    if info is not None:
        end = info.end or RankEnd(rank=rank, ending="ended")
        if end.ending != "killed":
            return end
    # A launcher ended it before it could write its run record; its stacks may be there.
    written = folder / stacks_text_name(rank)
    if not is_file(written):
        return end
    from recompute_scan.diagnose.places import main_stack, user_frame  # noqa: PLC0415 - as above

    try:
        with opened(written) as file:
            stack = main_stack(file.read(_LONGEST_STACKS).decode("utf-8", "replace"))
    except OSError:
        return end
    if not stack:
        return end
    end = end or RankEnd(rank=rank, ending="killed")
    frame = user_frame(stack)  # none where its script had already ended
    return replace(end, place=frame.place if frame is not None else None, stack=stack)


# Which rank's answer stands for the run when they differ: the worst.
_SEVERITY: dict[Verdict, int] = {
    "doubled": 4,
    "full": 3,
    "partial": 2,
    "none": 1,
    "inconclusive": 0,
}


class Piece(Struct, frozen=True):
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
    if len({rank.verdict for rank in result.ranks}) > 1:
        result = replace(result, headline=headline(result))
    return check_ranks(result)


def worst(pieces: Sequence[Piece]) -> Piece:
    """The piece whose answer stands for the run: the worst verdict, and of equal ones that of a
    rank whose gradients are wrong.
    """
    return max(pieces, key=_badness)


def _badness(piece: Piece) -> tuple[int, bool, int]:
    result = piece.result
    wrong = any(finding.wrong_gradients for finding in result.findings)
    return _SEVERITY[result.verdict], wrong, -piece.rank


def _rank(piece: Piece) -> Rank:
    cost = piece.result.cost
    return Rank(
        rank=piece.rank,
        trace=piece.name,
        verdict=piece.result.verdict,
        step_ms=cost.step_ms if cost else None,
        recomputes_per_block=_recomputes_per_block(piece.result),
        recompute_ms=cost.recompute_ms if cost else None,
    )


def _recomputes_per_block(result: Result) -> float | None:
    if result.verdict == "inconclusive" or not result.regions:
        return None
    return float(np.mean([region.recompute_runs_per_backward for region in result.regions]))


def _rank_warnings(pieces: Sequence[Piece]) -> tuple[str, ...]:
    verdicts = {piece.result.verdict for piece in pieces}
    if len(verdicts) < 2:
        return ()
    said = ", ".join(sorted(verdicts))
    return (f"The ranks differ ({said}); this report shows the worst.",)
