"""RS302: attention is recomputed, whose results are small for the time that they take."""

from __future__ import annotations

from recompute_scan.advise import advise_selective
from recompute_scan.cost.selective import KeptAttention
from recompute_scan.findings.base import Answer, NotApplicable, Rule, predicted
from recompute_scan.findings.evidence import Evidence
from recompute_scan.findings.memory_headroom import WORTH
from recompute_scan.result import Finding, Memory
from recompute_scan.units import ms, pct, plural, size


def check(evidence: Evidence) -> Answer:
    """One finding for all layers together."""
    if not evidence.on_gpu:
        return NotApplicable("The tensors lie in the host's memory, which other programs share.")
    if not evidence.has_shapes:
        return NotApplicable(
            "The trace has no input shapes: record with `recompute-scan run`, or with "
            "record_shapes=True."
        )
    cost = evidence.cost
    if cost is None:
        return NotApplicable("There is no step time to gain from.")
    kept = evidence.kept_attention
    if kept is None or kept.saving_ms < WORTH * cost.predicted_step_ms:
        return []
    return [_finding(evidence, kept)]


def _finding(evidence: Evidence, kept: KeptAttention) -> Finding:
    cost = evidence.cost
    assert cost is not None
    share = 100 * kept.saving_ms / cost.predicted_step_ms
    stacks = [region.checkpoints for region in evidence.regions if region.checkpoints]
    stack = max(stacks, key=stacks.count, default=())
    return RULE.finding(
        evidence,
        confidence=predicted(evidence),
        title=f"Keeping the results of attention would save about {pct(share)} of the step for "
        f"{size(kept.added_bytes)}",
        detail=(
            f"The recomputes run {plural(kept.calls, 'attention call')} again in each micro-batch. "
            f"Kept instead, their results take {size(kept.added_bytes)} of memory, and a step "
            f"takes about {ms(cost.predicted_step_ms - kept.saving_ms)} instead of "
            f"{ms(cost.predicted_step_ms)}. {_fits(evidence.memory, kept)}"
        ),
        evidence=(
            f"recomputed: {', '.join(kept.operators)}",
            f"{ms(kept.saving_ms)} per step in these recomputes",
        ),
        fix=advise_selective(stack, kept.operators, evidence.run) if stack else None,
        saving_ms=kept.saving_ms,
        saving_pct=share,
    )


def _fits(memory: Memory | None, kept: KeptAttention) -> str:
    if memory is None or memory.budget_bytes is None or memory.peak_allocated_bytes is None:
        return "Whether they fit is not known: the trace does not tell of the GPU's memory."
    left = memory.budget_bytes - memory.peak_allocated_bytes
    if kept.added_bytes <= left:
        return f"They fit: {size(left)} are free beside the reserve."
    return f"They do not fit: {size(max(0, left))} are free beside the reserve."


RULE = Rule("RS302", "selective-checkpoint", check)
