"""RS404: a recompute updates buffers that the forward has updated already."""

from __future__ import annotations

from recompute_scan.faithful import ComparedRegion, KeptState
from recompute_scan.findings.base import Answer, Rule
from recompute_scan.findings.differences import (
    CHECKPOINT_DOCS,
    count_blocks,
    name_blocks,
)
from recompute_scan.findings.evidence import RunEvidence
from recompute_scan.result import Finding, Fix

_MOST_SHOWN = 6


def check(evidence: RunEvidence) -> Answer:
    """One finding for all buffers, with their values after the forward and after the recompute; and
    one for what modules keep in attributes.
    """
    return [*_of_buffers(evidence), *_of_attributes(evidence)]


def _of_buffers(evidence: RunEvidence) -> list[Finding]:
    regions = evidence.compared
    updated = [(region, _buffers(region)) for region in regions if _buffers(region)]
    if not updated:
        return []
    buffers = [buffer for _, some in updated for buffer in some]
    return [
        RULE.finding(
            evidence,
            confidence="high",
            title=(
                f"Recomputes of {count_blocks(len(updated), len(regions))} update buffers once more"
            ),
            detail=(
                "What a module counts or averages in its forward, a recompute counts and averages "
                "again: token counts double, and running statistics follow the latest batch "
                "faster than momentum says. Gradients are wrong too where the block reads what it "
                "updates, which is reported as RS403."
            ),
            evidence=(*map(_change, buffers[:_MOST_SHOWN]), *name_blocks([r for r, _ in updated])),
            fix=Fix(
                summary=(
                    "Update such buffers outside the checkpointed block, or not in a recompute: "
                    "for BatchNorm leave the layer outside the checkpoint; where the model "
                    "library has a switch for it, use that."
                ),
                disposition="review",
                diff=None,
                keep="the checkpoint around everything else",
                remove="the module that keeps the buffer from the checkpointed block",
                docs=CHECKPOINT_DOCS,
                reason="Running statistics and counters change with it, and what evaluation uses.",
            ),
        )
    ]


def _of_attributes(evidence: RunEvidence) -> list[Finding]:
    regions = evidence.compared
    kept = [(one, [state for state in one.states if not state.is_buffer]) for one in regions]
    changed = [(region, states) for region, states in kept if states]
    if not changed:
        return []
    states = [state for _, some in changed for state in some]
    return [
        RULE.finding(
            evidence,
            severity="warning" if any(state.is_tensor for state in states) else "info",
            confidence="high",
            wrong_gradients=False,
            title=(
                f"Recomputes of {count_blocks(len(changed), len(regions))} count or collect once "
                f"more in {states[0].name}"
                + (f" and {len(states) - 1} other attributes" if len(states) > 1 else "")
            ),
            detail=(
                "What a module counts or collects outside of its buffers when its forward runs, a "
                "recompute counts or collects again. Where a result of the compared step depends "
                "on it, RS403 says so."
            ),
            evidence=(*map(_change, states[:_MOST_SHOWN]), *name_blocks([r for r, _ in changed])),
            fix=Fix(
                summary=(
                    "Count or collect outside the checkpointed block, or take it that every call "
                    "counts twice."
                ),
                disposition="review",
                diff=None,
                keep="the checkpoint",
                remove="the counting or collecting from the checkpointed block",
                docs=CHECKPOINT_DOCS,
                reason="Gradients stay as they are; what is counted or collected changes.",
            ),
        )
    ]


def _buffers(region: ComparedRegion) -> list[KeptState]:
    return [state for state in region.states if state.is_buffer]


def _change(state: KeptState) -> str:
    return (
        f"{state.name}: {state.before} before the step, {state.forward} after the forward, "
        f"{state.recompute} after the recompute"
    )


RULE = Rule(
    "RS404",
    "buffer-updated-twice",
    check_run=check,
    severity="warning",
    needs="comparison",
    wrong_gradients=True,
)
