"""RS406: recomputes that torch is told not to check against their forward."""

from __future__ import annotations

from collections import defaultdict

from recompute_scan.annotations import CHECK_OFF
from recompute_scan.faithful import ComparedRegion
from recompute_scan.findings.base import Answer, Rule
from recompute_scan.findings.differences import CHECKPOINT_DOCS, count_blocks, name_blocks, set_back
from recompute_scan.findings.evidence import RunEvidence
from recompute_scan.result import Finding, Fix

_SWITCH = "determinism_check"


def check(evidence: RunEvidence) -> Answer:
    """One finding for each call site that switches the check off."""
    off: dict[str, list[ComparedRegion]] = defaultdict(list)
    for region in evidence.compared:
        if CHECK_OFF in region.options:
            off[region.site].append(region)
    return [_finding(evidence, site, regions) for site, regions in off.items()]


def _finding(evidence: RunEvidence, site: str, regions: list[ComparedRegion]) -> Finding:
    blocks = count_blocks(len(regions), len(evidence.compared))
    return RULE.finding(
        evidence,
        title=f"Recomputes of {blocks} are not checked by torch",
        detail=(
            "A non-reentrant checkpoint compares the shapes and types of what a recompute saves "
            f'with the forward\'s, and raises where they differ; {_SWITCH}="none" switches that '
            f"off. A recompute that takes another way then gives wrong gradients in silence. "
            f"{_here(regions)}"
        ),
        evidence=name_blocks(regions),
        fix=Fix(
            summary=f"Leave {_SWITCH} at its default.",
            disposition="review",
            diff=set_back(evidence, site, _SWITCH, '"default"'),
            keep="the checkpoint",
            remove=f'{_SWITCH}="none"',
            docs=CHECKPOINT_DOCS,
            reason=(
                "Gradients stay what they are; where a recompute differs in shape or type, the "
                "backward pass raises instead. Where what the check refuses is intended, leave it "
                "off."
            ),
        ),
    )


def _here(regions: list[ComparedRegion]) -> str:
    """What the compared step has shown of these."""
    if any(region.differs for region in regions):
        return "Here recomputes do differ, as another finding says."
    if any(region.untold for region in regions):
        return "Whether recomputes differ here could not be told of all of them."
    return "In the step that was compared none differed."


RULE = Rule("RS406", "determinism-check-off", check_run=check, needs="comparison")
