"""RS001: forward work runs again more than once in its backward pass."""

from __future__ import annotations

from collections import defaultdict

from recompute_scan.advise import advise_removal, title_of
from recompute_scan.findings.base import Evidence, NotApplicable, Rule, describe
from recompute_scan.result import Checkpoint, Finding, Region

DOUBLED = 2.0
# A mean below this is one recompute with noise; above, some passes of a layer ran twice.
_MORE_THAN_ONCE = 1.5

_Checkpoints = tuple[Checkpoint, ...]


def check(evidence: Evidence) -> list[Finding] | NotApplicable:
    """One finding for each way in which checkpoints are stacked."""
    judgement = evidence.facts.judgement
    if judgement.verdict == "inconclusive":
        return NotApplicable(judgement.reason or "There is no verdict.")
    if judgement.verdict != "doubled":
        return []
    stacks: dict[_Checkpoints, list[Region]] = defaultdict(list)
    for region in evidence.regions:
        if region.recompute_runs_per_backward >= _MORE_THAN_ONCE:
            stacks[region.checkpoints].append(region)
    if not stacks:
        stacks[()] = []
    return [_finding(evidence, stack, regions) for stack, regions in stacks.items()]


def _finding(evidence: Evidence, stack: _Checkpoints, regions: list[Region]) -> Finding:
    facts, cost = evidence.facts, evidence.cost
    runs = max((r.recompute_runs_per_backward for r in regions), default=facts.judgement.highest)
    whole = f"{len(regions)} of {len(evidence.regions)} blocks" if regions else "Some operators"
    times = f"{runs:g} times" if runs is not None else "more than once"
    title = f"{whole} run their forward again {times} in each backward pass; once is enough"
    redundant = sum(region.redundant_ms_per_step for region in regions)
    share = 1.0
    everything = sum(region.redundant_ms_per_step for region in evidence.regions)
    if regions and everything:
        share = redundant / everything
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        confidence=evidence.confidence,
        title=title,
        detail=_detail(stack),
        evidence=(
            *(describe(checkpoint) for checkpoint in stack),
            *(_counted(region) for region in regions[:3]),
        ),
        fix=advise_removal(stack, evidence.sources, evidence.alone, evidence.run),
        saving_ms=(cost.step_ms - cost.predicted_step_ms) * share if cost else None,
        saving_pct=cost.saving_pct * share if cost else None,
    )


def _detail(stack: _Checkpoints) -> str:
    if len(stack) >= 2:
        titles = list(dict.fromkeys(title_of(checkpoint) for checkpoint in stack[:2]))
        names = " and ".join(titles)
        if len(titles) == 1:
            known = stack[0].mechanism is not None
            names = f"{len(stack)} checkpoints" + (f" of {titles[0]}" if known else "")
        return (
            f"{names} enclose the same work. Each of them runs the forward again in the "
            "backward pass, so all but one of these runs are wasted."
        )
    return (
        "More than one checkpoint encloses this work, and each runs the forward again in the "
        "backward pass. All but one of these runs are wasted."
    )


def _counted(region: Region) -> str:
    name = region.module or f"block {region.ordinal}"
    return (
        f"{name}: {region.forward_runs_per_step:g} forward runs per step, "
        f"{region.recompute_runs_per_backward:g} recomputes per backward"
    )


RULE = Rule("RS001", "doubled-checkpoint", check)
