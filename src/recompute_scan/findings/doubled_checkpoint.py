"""RS001: forward work runs again more than once in its backward pass."""

from __future__ import annotations

from recompute_scan.advise import advise_removal, title_of
from recompute_scan.findings.base import Answer, Rule, describe
from recompute_scan.findings.evidence import Evidence, Stack
from recompute_scan.result import DOUBLED, Finding, Region
from recompute_scan.units import plural

# A mean below this is one recompute with noise; above, some passes of a layer ran twice.
_MORE_THAN_ONCE = 1.5


def check(evidence: Evidence) -> Answer:
    """One finding for each way in which checkpoints are stacked."""
    if evidence.verdict != "doubled":
        return []
    stacks = evidence.stacks(lambda r: r.recompute_runs_per_backward >= _MORE_THAN_ONCE)
    return [_finding(evidence, stack, regions) for stack, regions in (stacks or {(): []}).items()]


def _finding(evidence: Evidence, stack: Stack, regions: list[Region]) -> Finding:
    cost = evidence.cost
    runs = max((r.recompute_runs_per_backward for r in regions), default=evidence.highest)
    whole = evidence.of_blocks(regions) if regions else "Some operators"
    times = f"{runs:g} times" if runs is not None else "more than once"
    title = f"{whole} run their forward again {times} in each backward pass; once is enough"
    redundant = sum(region.redundant_ms_per_step for region in regions)
    share = 1.0
    everything = sum(region.redundant_ms_per_step for region in evidence.regions)
    if regions and everything:
        share = redundant / everything
    return RULE.finding(
        evidence,
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


def _detail(stack: Stack) -> str:
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
    if len(stack) == 1 and stack[0].call_site:
        return (
            "One checkpoint encloses this work. Its backward pass comes in parts, as where a "
            "pipeline schedule gets the gradients of inputs and of weights apart, or "
            "autograd.grad is called for one group of weights after the other. Each part runs the "
            "whole forward again. One backward pass for all, a schedule that does not split it, or "
            "no checkpoint on what is split needs no further run."
        )
    return (
        "More than one checkpoint encloses this work, and each runs the forward again in the "
        "backward pass. All but one of these runs are wasted."
    )


def _counted(region: Region) -> str:
    name = region.module or f"block {region.ordinal}"
    return (
        f"{name}: {plural(region.forward_runs_per_step, 'forward run')} per step, "
        f"{plural(region.recompute_runs_per_backward, 'recompute')} per backward pass"
    )


RULE = Rule(DOUBLED, "doubled-checkpoint", check, severity="error")
