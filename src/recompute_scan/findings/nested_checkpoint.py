"""RS002: two checkpoints enclose the same work, and one of them happens to cost nothing."""

from __future__ import annotations

from collections import defaultdict

from recompute_scan.advise import advise_removal, title_of
from recompute_scan.findings.base import Evidence, NotApplicable, Rule, describe
from recompute_scan.result import Checkpoint, Finding, Region

_AT_MOST_ONCE = 1.5


def check(evidence: Evidence) -> list[Finding] | NotApplicable:
    """One finding for each pair of checkpoints that is nested without being doubled."""
    if evidence.facts.judgement.verdict == "inconclusive":
        return NotApplicable(evidence.facts.judgement.reason or "There is no verdict.")
    if evidence.facts.annotations is None and evidence.facts.judgement.verdict != "none":
        return NotApplicable(
            "A nested checkpoint that recomputes nothing shows only in a trace that "
            "`recompute-scan run` recorded."
        )
    stacks: dict[tuple[Checkpoint, ...], list[Region]] = defaultdict(list)
    for region in evidence.regions:
        once = 0 < region.recompute_runs_per_backward < _AT_MOST_ONCE
        if len(region.checkpoints) >= 2 and once:
            stacks[region.checkpoints].append(region)
    return [_finding(evidence, stack, regions) for stack, regions in stacks.items()]


def _finding(evidence: Evidence, stack: tuple[Checkpoint, ...], regions: list[Region]) -> Finding:
    outer, inner = title_of(stack[0]), title_of(stack[1])
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="info",
        confidence=evidence.confidence,
        title=f"{len(regions)} of {len(evidence.regions)} blocks have {len(stack)} checkpoints "
        "around them, and recompute once",
        detail=(
            f"{outer} encloses {inner}. Both are non-reentrant and stop early, so the outer "
            "recompute ends before the inner work begins, and today the second one costs nothing. "
            "With a reentrant variant, or with early stop off, every block would run twice."
        ),
        evidence=tuple(describe(checkpoint) for checkpoint in stack),
        fix=advise_removal(stack, evidence.sources, evidence.alone, evidence.run),
        saving_ms=0.0,
        saving_pct=0.0,
    )


RULE = Rule("RS002", "nested-checkpoint", check)
