"""RS002: two checkpoints enclose the same work, and one of them happens to cost nothing."""

from __future__ import annotations

from recompute_scan.advise import advise_removal, title_of
from recompute_scan.findings.base import Answer, NotApplicable, Rule, describe
from recompute_scan.findings.evidence import Evidence, Stack
from recompute_scan.result import Finding, Region

_AT_MOST_ONCE = 1.5


def check(evidence: Evidence) -> Answer:
    """One finding for each pair of checkpoints that is nested without being doubled."""
    if not evidence.annotated and evidence.verdict != "none":
        return NotApplicable(
            "A nested checkpoint that recomputes nothing shows only in a trace that "
            "`recompute-scan run` recorded."
        )
    stacks = evidence.stacks(
        lambda r: len(r.checkpoints) >= 2 and 0 < r.recompute_runs_per_backward < _AT_MOST_ONCE
    )
    return [_finding(evidence, stack, regions) for stack, regions in stacks.items()]


def _finding(evidence: Evidence, stack: Stack, regions: list[Region]) -> Finding:
    outer, inner = title_of(stack[0]), title_of(stack[1])
    return RULE.finding(
        evidence,
        title=f"{evidence.of_blocks(regions)} have {len(stack)} checkpoints "
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
