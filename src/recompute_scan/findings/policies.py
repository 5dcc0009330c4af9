"""Memory that would allow fewer checkpoints, and selective policies that miss their aim.

RS301: the GPU has memory left for layers that are checkpointed all the same.

RS302: attention is recomputed, though its results are small for the time that they take.

RS501: a policy of a selective checkpoint was asked, and kept nothing.

RS502: a policy names an operator that it never meets, and others that it keeps.

RS503: an operator that a policy leaves out costs more for its bytes than all that it keeps.

RS504: a policy keeps results that no recompute asks for.

RS505: an operator is recomputed though its result was in memory all the time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence

from msgspec import Struct

from recompute_scan.advise import advise_fewer, advise_selective, place
from recompute_scan.cost.memory import KeptAttention
from recompute_scan.findings.base import Answer, Evidence, NotApplicable, Rule, predicted, review
from recompute_scan.frameworks.base import SELECTIVE_DOCS
from recompute_scan.recompute import vocabulary
from recompute_scan.result import Checkpoint, Finding, Fix, Memory, MemoryPlan, Region
from recompute_scan.result.fidelity import DecidedOperator, PolicyEntry, WatchedPolicy
from recompute_scan.result.patch import change_diff
from recompute_scan.units import ms, pct, plural, size

# Less of a step than this is not worth a change.
WORTH = 0.01


def check_memory_headroom(evidence: Evidence) -> Answer:
    """One finding, with the fastest plan that fits."""
    memory, cost = evidence.memory, evidence.cost
    if memory is None and not evidence.on_gpu:
        return NotApplicable(
            "The steps ran on the CPU; whether layers fit there without checkpoints is not judged."
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
    pct = 100 * gain / cost.step_ms
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
            f"these checkpoints free {size(freed)} in one micro-batch",
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
    share = 100 * kept.saving_ms / cost.step_ms
    stacks = [region.checkpoints for region in evidence.regions if region.checkpoints]
    stack = max(stacks, key=stacks.count, default=())
    return RS302.finding(
        evidence,
        confidence=predicted(evidence),
        title=f"Keeping attention's results would save about {pct(share)} of the step and take "
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
        return f"They fit: {size(left)} are free beyond a reserve of a tenth of the GPU."
    return f"They do not fit: {size(max(0, left))} are free beyond a reserve of a tenth of the GPU."


RS302 = Rule("RS302", "selective-checkpoint", check_selective_checkpoint)


class DearOperator(Struct, frozen=True):
    """An operator that takes time in its recompute under a policy.

    Attributes:
        policy: The policy.
        operator: What was decided about it.
        ms: What its recomputes take per step.
        pct: That as a part of the step.
    """

    policy: WatchedPolicy
    operator: DecidedOperator
    ms: float
    pct: float


def describe_decided(policy: WatchedPolicy) -> tuple[str, ...]:
    """The policy and its checkpoint, as lines of evidence."""
    defined = place(policy.defined or None)
    asked = plural(policy.regions, "region")
    return (
        f"policy: {policy.name}{defined}",
        f"checkpoint: {policy.mechanism or 'unknown'}{place(policy.site or None)}, {asked}",
    )


def overloads_met(policy: WatchedPolicy, entry: PolicyEntry) -> list[DecidedOperator]:
    """The operators that were called under an entry's name, whatever their overload."""
    if entry.kind == "packet":
        return [one for one in policy.operators if one.name.startswith(f"{entry.name}.")]
    return [one for one in policy.operators if one.name == entry.name]


def _check_dear(
    wanted: Callable[[WatchedPolicy, DecidedOperator], bool],
    finding: Callable[[Evidence, DearOperator], Finding],
) -> Callable[[Evidence], Answer]:
    """A check with one finding for each wanted operator that takes enough of a step again."""

    def check(evidence: Evidence) -> Answer:
        cost = evidence.cost
        if cost is None:
            return NotApplicable("There is no step time to compare with.")
        every = [
            DearOperator(policy, one, time, 100 * time / cost.step_ms)
            for policy in evidence.decided
            for one in policy.operators
            if (time := one.recompute_ms_per_step or 0.0) >= WORTH * cost.step_ms
        ]
        return [finding(evidence, dear) for dear in every if wanted(dear.policy, dear.operator)]

    return check


def keep_too(summary: str, reason: str) -> Fix:
    """The fix that lets a policy keep one more operator."""
    return review(
        summary=summary,
        keep="what the policy keeps already",
        remove="",
        docs=SELECTIVE_DOCS,
        reason=reason,
    )


def spell_overloads(
    evidence: Evidence, policy: WatchedPolicy, entries: list[PolicyEntry]
) -> str | None:
    """A diff that gives the entries of one statement the overload that is called.

    ``None`` where the source is not the user's, where several overloads of one are called, or where
    it is spelled otherwise.
    """
    site = next((one.site for one in entries if one.site), "")
    source = evidence.sources.get(site)
    if source is None or source.installed:
        return None
    text = source.text.split("\n")
    lines = text[source.begin - source.first : source.end - source.first + 1]
    new = "\n".join(lines)
    for entry in entries:
        met = overloads_met(policy, entry)
        if len(met) != 1:
            return None
        spelled = re.compile(rf"(\bops\.{re.escape(entry.name)})(?![\w.])")
        new = spelled.sub(rf"\1.{met[0].name.rpartition('.')[2]}", new)
    changed = new.split("\n")
    return change_diff(site, source, changed) if changed != lines else None


def may_keep(policy: WatchedPolicy, collection: str) -> bool:
    """Does the policy keep the operators in this collection? Each that was met was kept at least
    once, and one was.
    """
    met = [
        one
        for one in policy.entries
        if one.collection == collection and one.kind == "operator" and one.met
    ]
    return bool(met) and all(one.kept for one in met)


def check_policy_matches_nothing(evidence: Evidence) -> Answer:
    """One finding for each policy that kept no operator that it named."""
    return [
        _policy_matches_nothing_finding(evidence, policy)
        for policy in evidence.decided
        if policy.met and not policy.kept and not policy.raised
    ]


def _policy_matches_nothing_finding(evidence: Evidence, policy: WatchedPolicy) -> Finding:
    missed = [one for one in policy.entries if one.kind == "packet" and one.met and not one.kept]
    called = [
        f"it names {entry.name}; called were: "
        + ", ".join(f"{met.name} ({met.met} times)" for met in overloads_met(policy, entry))
        for entry in missed
    ]
    unmet = [one.name for one in policy.entries if not one.met]
    if unmet:
        called.append(f"named, but never called: {', '.join(unmet[:8])}")
    # An operator named without its overload equals no call, compiled or not.
    hidden = evidence.compiled_calls_again > 0 and not missed and bool(unmet)
    why = (
        "It names operators without an overload, and no call matches such a name."
        if missed
        else "Part of the step is compiled, and no policy sees the operators in compiled code."
        if hidden
        else "None of the operators that it names is called here."
        if unmet
        else "Its function decided this."
    )
    return RS501.finding(
        evidence,
        confidence="medium" if hidden else "high",
        title=f"The policy {policy.name} keeps nothing: its checkpoint recomputes everything",
        detail=(
            f"It was asked {plural(policy.met, 'time')} in one step, and no result was kept. {why} "
            "A checkpoint without a policy does the same, without asking at each operator."
        ),
        evidence=(*describe_decided(policy), *called),
        fix=review(
            summary="Name the overload that is called, such as torch.ops.aten.mm.default."
            if missed
            else "Compile the code that calls the checkpoint rather than the block in it, so that "
            "the compiler applies the policy, or remove the policy (context_fn)."
            if hidden
            else "Name operators that are called, or leave the policy out (context_fn).",
            diff=spell_overloads(evidence, policy, missed) if missed else None,
            keep="the checkpoint",
            remove="" if missed else "context_fn, if everything is to be recomputed",
            docs=SELECTIVE_DOCS,
            reason="Kept results take memory: see that they fit.",
        ),
    )


RS501 = Rule(
    "RS501",
    "policy-matches-nothing",
    check_policy_matches_nothing,
    severity="warning",
    needs="policies",
)


def check_entry_never_met(evidence: Evidence) -> Answer:
    """One finding for each policy of the user's own that has such entries."""
    found = []
    for policy in evidence.decided:
        missed = _missed(policy)
        if evidence.compiled_calls_again:  # a policy sees no operator of compiled code
            missed = [entry for entry in missed if entry.met]
        if policy.own and policy.kept and missed:
            found.append(_entry_never_met_finding(evidence, policy, missed))
    return found


def _missed(policy: WatchedPolicy) -> list[PolicyEntry]:
    """Entries that match no call, in a collection with kept ones.

    Attention has one operator for each backend, and lists name them all: where one was met, the
    others are its alternatives.
    """
    attends = any(one.kept and _is_attention(one) for one in policy.entries)
    return [
        one
        for one in policy.entries
        if may_keep(policy, one.collection)
        and not one.kept
        and (one.kind != "operator" or not one.met)
        and not (attends and not one.met and _is_attention(one))
    ]


def _is_attention(entry: PolicyEntry) -> bool:
    return vocabulary.family_of("::".join(entry.name.split(".")[:2]))[1] == "attention"


def _entry_never_met_finding(
    evidence: Evidence, policy: WatchedPolicy, missed: list[PolicyEntry]
) -> Finding:
    packets = [one for one in missed if one.kind == "packet" and one.met]
    lines = [
        f"{one.name} in {one.collection}: "
        + (
            "called as "
            + ", ".join(f"{m.name} ({m.met} times)" for m in overloads_met(policy, one))
            if one.met
            else f"not called in {plural(policy.met, 'operator call')}"
        )
        for one in missed
    ]
    kept = sum(one.kept > 0 for one in policy.entries)
    return RS502.finding(
        evidence,
        confidence="high",
        title=f"{len(missed)} of {len(policy.entries)} operators that the policy {policy.name} "
        f"names {'are' if len(missed) != 1 else 'is'} never met",
        detail=(
            f"{kept} of {len(policy.entries)} entries keep results. The others have no effect in "
            "the recorded step: "
            + (
                "an operator named without its overload matches no call"
                if packets
                else "their operators are not called under this checkpoint"
            )
            + "."
        ),
        evidence=(*describe_decided(policy), *lines),
        fix=review(
            summary="Name the overload that is called, such as torch.ops.aten.mm.default."
            if packets
            else "Take the entries out, or name the operators that are called instead.",
            diff=spell_overloads(evidence, policy, packets) if packets else None,
            keep="the other entries",
            remove="" if packets else ", ".join(one.name for one in missed),
            docs=SELECTIVE_DOCS,
            reason="Kept results take memory: see that they fit.",
        ),
    )


RS502 = Rule("RS502", "entry-never-met", check_entry_never_met, needs="policies")


def _left_out(policy: WatchedPolicy, one: DecidedOperator) -> bool:
    """Is it always recomputed, and dearer by its bytes than the policy's own cheapest choice?"""
    if one.kept or one.recomputed < one.met or not one.result_bytes:
        return False
    prices = [
        (kept.forward_ms_per_step or 0.0) / kept.kept_bytes
        for kept in policy.operators
        if kept.kept_bytes and kept.forward_ms_per_step is not None and kept.served
    ]
    return bool(prices) and (one.recompute_ms_per_step or 0.0) / one.result_bytes > min(prices)


def _expensive_operator_finding(evidence: Evidence, dear: DearOperator) -> Finding:
    one = dear.operator
    return RS503.finding(
        evidence,
        confidence=predicted(evidence),
        title=(
            f"{one.name} is recomputed under the policy {dear.policy.name}, "
            f"for {ms(dear.ms)} per step"
        ),
        detail=(
            f"That is {pct(dear.pct)} of the step; kept, its {plural(one.met, 'result')} would "
            f"take {size(one.result_bytes)}. Per byte, that costs more time than at least one "
            "operator that the policy keeps."
        ),
        evidence=(
            *describe_decided(dear.policy),
            f"{one.name}: met {one.met} times, recomputed {one.recomputed} times",
        ),
        fix=keep_too(
            f"Keep torch.ops.{one.name} too, if its {size(one.result_bytes)} fit.",
            "It takes memory.",
        ),
        saving_ms=dear.ms,
        saving_pct=dear.pct,
    )


RS503 = Rule(
    "RS503",
    "expensive-op-not-listed",
    _check_dear(_left_out, _expensive_operator_finding),
    needs="policies",
)


# Of what the policy keeps, so much at least.
_MUCH = 0.01


def check_keep_buys_nothing(evidence: Evidence) -> Answer:
    """One finding for each policy that keeps something for nothing."""
    found = []
    for policy in evidence.decided:
        useless = [one for one in policy.operators if _useless(policy, one)]
        if useless:
            found.append(_keep_buys_nothing_finding(evidence, policy, useless))
    return found


def _useless(policy: WatchedPolicy, one: DecidedOperator) -> bool:
    """Were its results kept in memory, and did no recompute ask for one?

    Known only where every region was recomputed: one with its backward still to come may ask.
    """
    enough = one.kept_bytes > _MUCH * policy.kept_bytes
    return enough and not one.served and policy.recomputes >= policy.regions > 0


def _keep_buys_nothing_finding(
    evidence: Evidence, policy: WatchedPolicy, useless: list[DecidedOperator]
) -> Finding:
    together = sum(one.kept_bytes for one in useless)
    names = ", ".join(one.name for one in useless)
    return RS504.finding(
        evidence,
        confidence="high",
        title=f"The policy {policy.name} keeps {size(together)} that no recompute asks for",
        detail=(
            f"{names}: the results are kept in the forward, but every recompute stops before it "
            "needs them. A policy that recomputes these operators would cost no time either."
        ),
        evidence=(
            *describe_decided(policy),
            *(
                f"{one.name}: kept {one.kept} times, {size(one.kept_bytes)}; asked for 0 times"
                for one in useless
            ),
        ),
        fix=review(
            summary=f"Let the policy recompute {names}: it frees {size(together)}.",
            keep="the other operators",
            remove=names,
            docs=SELECTIVE_DOCS,
            reason="The same operator may be needed elsewhere, under another checkpoint.",
        ),
    )


RS504 = Rule("RS504", "keep-buys-nothing", check_keep_buys_nothing, needs="policies")


def _frees_nothing(_: WatchedPolicy, one: DecidedOperator) -> bool:
    """Was all that it returned still there when the backward pass began?"""
    return one.recomputed >= one.met > 0 and 0 < one.result_bytes == one.held_bytes


def _recompute_buys_nothing_finding(evidence: Evidence, dear: DearOperator) -> Finding:
    one = dear.operator
    return RS505.finding(
        evidence,
        confidence=predicted(evidence),
        title=f"Recomputing {one.name} costs {ms(dear.ms)} per step and frees nothing",
        detail=(
            f"Its {plural(one.met, 'result')} ({size(one.held_bytes)}) were all in memory when "
            "the backward pass began, because something else holds them: the next block's input, "
            "or a variable. If the policy kept them, they would take no further memory."
        ),
        evidence=(
            *describe_decided(dear.policy),
            f"{one.name}: {size(one.result_bytes)} returned, {size(one.held_bytes)} still there",
        ),
        fix=keep_too(
            f"Keep torch.ops.{one.name} too: its results are in memory anyway.",
            "Other calls of the operator may have results that are freed today.",
        ),
        saving_ms=dear.ms,
        saving_pct=dear.pct,
    )


RS505 = Rule(
    "RS505",
    "recompute-buys-nothing",
    _check_dear(_frees_nothing, _recompute_buys_nothing_finding),
    needs="policies",
)
