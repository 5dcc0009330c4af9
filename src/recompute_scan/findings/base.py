"""What a rule gets to see, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from recompute_scan.advise import RunFacts, Switch, place, switch_of, title_of
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.result import Checkpoint, Cost, Finding, Level, Memory, Rank, Region
from recompute_scan.run_info import Source, SwitchedOn


@dataclass(frozen=True)
class Evidence:
    """All that a rule may look at.

    Attributes:
        facts: What ran again.
        regions: One row per layer.
        cost: Price of the recomputes, or ``None``.
        confidence: How sure the counts are.
        sources: Statements at call sites, from the run's own run record.
        switched_on: What was switched on when a recorded run ended; empty without one.
        environment: Versions and settings of the recorded run; empty without one.
        memory: Memory of a recorded step, or ``None``.
        untrained: Modules whose trainable weights got no gradient; ``None`` where nobody looked.
    """

    facts: RecomputeFacts
    regions: tuple[Region, ...]
    cost: Cost | None
    confidence: Level
    sources: Mapping[str, Source]
    switched_on: tuple[SwitchedOn, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    memory: Memory | None = None
    untrained: tuple[str, ...] | None = None

    @property
    def run(self) -> RunFacts:
        """What of the run bears on advice."""
        return RunFacts(self.environment, is_sharded(self.facts))

    @property
    def alone(self) -> frozenset[Switch]:
        """Switches that are the only checkpoint of some block."""
        return frozenset(
            switch_of(region.checkpoints[0])
            for region in self.regions
            if len(region.checkpoints) == 1
        )


@dataclass(frozen=True)
class NotApplicable:
    """The rule could not look: why, one sentence."""

    why: str


@dataclass(frozen=True)
class Rule:
    """One rule: a code that never changes its meaning, a name for the bad state, a check.

    ``check_ranks`` is for what only several ranks together show; it comes after their results.
    """

    code: str
    name: str
    check: Callable[[Evidence], list[Finding] | NotApplicable]
    check_ranks: Callable[[Sequence[Rank]], list[Finding] | NotApplicable] | None = None


def is_sharded(facts: RecomputeFacts) -> bool:
    """Whether the trace shows FSDP at work."""
    return bool(len(facts.calls.named(words.SHARDING)))


def describe(checkpoint: Checkpoint) -> str:
    """One checkpoint as a line of evidence: depth, mechanism, variant and call site."""
    variant = f", {checkpoint.variant}" if checkpoint.variant else ""
    options = "".join(f", {option.replace('-', ' ')}" for option in checkpoint.options)
    where = place(checkpoint.call_site)
    return f"depth {checkpoint.depth}: {title_of(checkpoint)}{variant}{options}{where}"


def no_verdict(evidence: Evidence) -> NotApplicable | None:
    """Why no rule on recomputes can look at this trace; ``None`` where one can."""
    judgement = evidence.facts.judgement
    if judgement.verdict == "inconclusive":
        return NotApplicable(judgement.reason or "There is no verdict.")
    return None
