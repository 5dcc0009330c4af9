"""RS004: some ranks recompute more of their blocks than others."""

from __future__ import annotations

from collections.abc import Sequence

from recompute_scan.findings.base import Answer, NotApplicable, Rule
from recompute_scan.findings.evidence import RankEvidence

# Recomputes per block; one more layer of eight recomputed is more than this.
_UNEVEN = 0.1


def check_ranks(evidence: RankEvidence) -> Answer:
    """One finding where the ranks' recomputes per block differ."""
    known = [rank for rank in evidence.ranks if rank.recomputes_per_block is not None]
    if len(known) < 2:
        return NotApplicable("The traces of two or more ranks with a verdict are needed.")
    recomputes = [rank.recomputes_per_block or 0.0 for rank in known]
    most, least = max(recomputes), min(recomputes)
    if most - least < _UNEVEN:
        return []
    busiest = [rank.rank for rank, value in zip(known, recomputes, strict=True) if value == most]
    times = [rank.recompute_ms for rank in known if rank.recompute_ms is not None]
    spread = (
        f" Recomputes take from {min(times):.1f} to {max(times):.1f} ms of a step." if times else ""
    )
    return [
        RULE.finding(
            evidence,
            title=f"Ranks recompute from {least:.2g} to {most:.2g} times per block; "
            f"most on {_listed(busiest)}",
            detail=(
                "Ranks that work on the same step wait for each other, so the one that recomputes "
                f"most sets the pace for all.{spread} Pipeline stages may differ on purpose: the "
                "first holds the activations of more micro-batches. Otherwise look for a setting "
                "that is not the same on all ranks."
            ),
            evidence=[
                f"rank {rank.rank}: {value:.3g} recomputes per block"
                + (
                    f", {rank.recompute_ms:.1f} ms per step"
                    if rank.recompute_ms is not None
                    else ""
                )
                for rank, value in zip(known, recomputes, strict=True)
            ],
        )
    ]


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (", …" if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


RULE = Rule(
    "RS004",
    "uneven-recompute",
    check_ranks=check_ranks,
    severity="warning",
    needs="nothing",
)
