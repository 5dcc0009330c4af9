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
from recompute_scan.result import Fix

_MOST_SHOWN = 6


def check(evidence: RunEvidence) -> Answer:
    """One finding for all buffers, with their values after the forward and after the recompute."""
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
