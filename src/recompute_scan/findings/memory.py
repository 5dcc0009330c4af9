"""RS301 and RS302: memory that would allow fewer checkpoints.

RS301: the GPU has memory left for layers that are checkpointed all the same.

RS302: attention is recomputed, though its results are small for the time that they take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from recompute_scan.advise import advise_fewer, advise_selective
from recompute_scan.cost.memory import KeptAttention
from recompute_scan.findings.base import Answer, Evidence, NotApplicable, Rule, predicted
from recompute_scan.result import Checkpoint, Finding, Memory, MemoryPlan, Region
from recompute_scan.units import ms, pct, plural, size

# Less of a step than this is not worth a change.
WORTH = 0.01


def check_memory_headroom(evidence: Evidence) -> Answer:
    """One finding, with the fastest plan that fits."""
    memory, cost = evidence.memory, evidence.cost
    if memory is None and not evidence.on_gpu:
        return NotApplicable(
            "The steps ran on the CPU; how much of the host's memory layers may take is not judged."
        )
    if memory is None:
        return NotApplicable(
            "The trace does not show memory: record with `recompute-scan run`, or with "
            "profile_memory=True."
        )
    if cost is None or memory.reason is not None or memory.budget_bytes is None:
        return NotApplicable(memory.reason or "The trace does not show how much memory there is.")
    if memory.chosen is None:
        return []
    plan = memory.plans[memory.chosen]
    gain = cost.predicted_step_ms - plan.step_ms
    if not plan.regions or gain < WORTH * cost.predicted_step_ms:
        return []
    return [_memory_headroom_finding(evidence, memory, plan, gain)]


def _memory_headroom_finding(
    evidence: Evidence, memory: Memory, plan: MemoryPlan, gain: float
) -> Finding:
    cost = evidence.cost
    assert cost is not None
    chosen = [region for region in evidence.regions if region.ordinal in plan.regions]
    checkpointed = [region for region in evidence.regions if region.checkpoints]
    whole = len(chosen) >= len(checkpointed)
    stacks: dict[tuple[Checkpoint, ...], int] = defaultdict(int)
    for region in chosen:
        stacks[region.checkpoints] += 1
    stack = max(stacks, key=lambda checkpoints: stacks[checkpoints])
    pct = 100 * gain / cost.predicted_step_ms
    freed = sum(one.saved_bytes or 0 for one in memory.regions if one.ordinal in set(plan.regions))
    now = memory.plans[0].peak_bytes
    assert memory.capacity_bytes and memory.budget_bytes
    held = memory.capacity_bytes - (memory.reserve_bytes or 0) - memory.budget_bytes
    beside = f" and {size(held)} that torch held unused" if held else ""
    return RS301.finding(
        evidence,
        confidence=predicted(evidence),
        title=f"{evidence.of_blocks(chosen)} need no checkpoint: the GPU has memory left for them",
        detail=(
            f"Without their checkpoints a step takes about {ms(plan.step_ms)} instead of "
            f"{ms(cost.predicted_step_ms)}, and at most {size(plan.peak_bytes)} are allocated "
            f"instead of {size(now)}. Of {size(memory.capacity_bytes)}, "
            f"{size(memory.reserve_bytes)}{beside} stay in reserve."
        ),
        evidence=(
            f"stop checkpointing {names_of(chosen)}",
            f"these checkpoints keep {size(freed)} out of memory in one micro-batch",
            f"{size(memory.budget_bytes)} may be allocated; the recorded step allocated at most "
            f"{size(now)}",
        ),
        fix=advise_fewer(stack, names_of(chosen), whole, evidence.run) if stack else None,
        saving_ms=gain,
        saving_pct=pct,
    )


def names_of(regions: Sequence[Region]) -> str:
    """Modules in words: ``model.layers.0 to model.layers.5``; plain numbers without names."""
    named = [region.module or f"block {region.ordinal}" for region in regions]
    ordinals = [region.ordinal for region in regions]
    if len(named) > 2 and ordinals == list(range(ordinals[0], ordinals[-1] + 1)):
        return f"{named[0]} to {named[-1]}"
    if len(named) > _MOST_NAMED:
        return f"{', '.join(named[:_MOST_NAMED])} and {plural(len(named) - _MOST_NAMED, 'other')}"
    return ", ".join(named)


_MOST_NAMED = 12

RS301 = Rule("RS301", "memory-headroom", check_memory_headroom, gives_plan=True)


def check_selective_checkpoint(evidence: Evidence) -> Answer:
    """One finding for all layers together."""
    if not evidence.on_gpu:
        return NotApplicable("The tensors are in the host's memory, which other programs share.")
    if not evidence.has_shapes:
        return NotApplicable(
            "The trace has no input shapes: record with `recompute-scan run`, or with "
            "record_shapes=True."
        )
    cost = evidence.cost
    if cost is None:
        return NotApplicable("The step time is unknown, so a saving cannot be computed.")
    kept = evidence.kept_attention
    if kept is None or kept.saving_ms < WORTH * cost.predicted_step_ms:
        return []
    return [_selective_checkpoint_finding(evidence, kept)]


def _selective_checkpoint_finding(evidence: Evidence, kept: KeptAttention) -> Finding:
    cost = evidence.cost
    assert cost is not None
    share = 100 * kept.saving_ms / cost.predicted_step_ms
    stacks = [region.checkpoints for region in evidence.regions if region.checkpoints]
    stack = max(stacks, key=stacks.count, default=())
    return RS302.finding(
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
        return "Whether they fit is not known: the trace does not show the GPU's memory."
    left = memory.budget_bytes - memory.peak_allocated_bytes
    if kept.added_bytes <= left:
        return f"They fit: {size(left)} are free without the reserve."
    return f"They do not fit: {size(max(0, left))} are free without the reserve."


RS302 = Rule("RS302", "selective-checkpoint", check_selective_checkpoint)
