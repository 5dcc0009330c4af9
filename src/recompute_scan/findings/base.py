"""What a rule gets to see, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from recompute_scan.advise import title_of
from recompute_scan.recompute.facts import Recompute
from recompute_scan.result import Checkpoint, Cost, Finding, Level, Region
from recompute_scan.run_info import Source


@dataclass(frozen=True)
class Evidence:
    """All that a rule may look at.

    Attributes:
        facts: What ran again.
        regions: One row per layer.
        cost: Price of the replays, or ``None``.
        confidence: How sure the counts are.
        sources: Statements at call sites, from the run's own account.
    """

    facts: Recompute
    regions: tuple[Region, ...]
    cost: Cost | None
    confidence: Level
    sources: Mapping[str, Source]


@dataclass(frozen=True)
class NotApplicable:
    """The rule could not look: why, one sentence."""

    why: str


@dataclass(frozen=True)
class Rule:
    """One rule: a code that never changes its meaning, a name for the bad state, a check."""

    code: str
    name: str
    check: Callable[[Evidence], list[Finding] | NotApplicable]


def describe(checkpoint: Checkpoint) -> str:
    """One checkpoint as a line of evidence: depth, mechanism, variant and call site."""
    place = f" at {checkpoint.call_site}" if checkpoint.call_site else ""
    variant = f", {checkpoint.variant}" if checkpoint.variant else ""
    return f"depth {checkpoint.depth}: {title_of(checkpoint.mechanism)}{variant}{place}"
