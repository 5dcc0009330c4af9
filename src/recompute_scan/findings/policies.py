"""RS301, RS302, RS501 to RS505: memory for fewer checkpoints, policies that miss their aim."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from recompute_scan.advise.choice import place
from recompute_scan.advise.settings import advise_fewer, advise_selective
from recompute_scan.cost.memory import KeptAttention
from recompute_scan.findings.base import Evidence, NotApplicable, Rule, predicted, review
from recompute_scan.frameworks.base import SELECTIVE_DOCS
from recompute_scan.recompute import vocabulary
from recompute_scan.result import Cost, Finding, Memory, MemoryPlan, Region
from recompute_scan.result.fidelity import DecidedOperator, PolicyEntry, WatchedPolicy
from recompute_scan.result.patch import change_diff
from recompute_scan.units import ms, pct, plural, size

# Less of a step than this is not worth a change.
WORTH = 0.01


@partial(Rule, "RS301", "memory-headroom", gives_plan=True)
def memory_headroom(evidence: Evidence) -> Iterator[Finding]:
    """The GPU has memory left for layers that are checkpointed: the fastest plan that fits."""
    memory, cost = evidence.memory, evidence.cost
    if memory is None and not evidence.on_gpu:
        raise NotApplicable(
            "The steps ran on the CPU; whether layers fit there without checkpoints is not judged."
        )
    if memory is None:
        raise NotApplicable(
            "The trace does not show memory: record with `recompute-scan run`, or with "
            "profile_memory=True."
        )
    if cost is None or memory.reason is not None or memory.budget_bytes is None:
        raise NotApplicable(memory.reason or "The trace does not show how much memory there is.")
    if memory.chosen is None:
        return
    plan = memory.plans[memory.chosen]
    gain = cost.predicted_step_ms - plan.step_ms
    if plan.regions and gain >= WORTH * cost.predicted_step_ms:
        yield _headroom(evidence, cost, memory, plan)


def _headroom(evidence: Evidence, cost: Cost, memory: Memory, plan: MemoryPlan) -> Finding:
    gain = cost.predicted_step_ms - plan.step_ms
    chosen = [region for region in evidence.regions if region.ordinal in plan.regions]
    checkpointed = [region for region in evidence.regions if region.checkpoints]
    whole = len(chosen) >= len(checkpointed)
    stacks = Counter(region.checkpoints for region in chosen)
    stack = max(stacks, key=lambda checkpoints: stacks[checkpoints])
    freed = sum(one.saved_bytes or 0 for one in memory.regions if one.ordinal in set(plan.regions))
    now = memory.plans[0].peak_bytes
    assert memory.capacity_bytes and memory.budget_bytes
    held = memory.capacity_bytes - (memory.reserve_bytes or 0) - memory.budget_bytes
    beside = f" and {size(held)} that torch held unused" if held else ""
    return memory_headroom.finding(
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
        saving_pct=100 * gain / cost.step_ms,
    )


_MOST_NAMED = 12


def names_of(regions: Sequence[Region]) -> str:
    """Modules in words: ``model.layers.0 to model.layers.5``; plain numbers without names."""
    named = [region.module or f"block {region.ordinal}" for region in regions]
    ordinals = [region.ordinal for region in regions]
    if len(named) > 2 and ordinals == list(range(ordinals[0], ordinals[-1] + 1)):
        return f"{named[0]} to {named[-1]}"
    if len(named) > _MOST_NAMED:
        return f"{', '.join(named[:_MOST_NAMED])} and {plural(len(named) - _MOST_NAMED, 'other')}"
    return ", ".join(named)


@partial(Rule, "RS302", "selective-checkpoint")
def selective_checkpoint(evidence: Evidence) -> Iterator[Finding]:
    """Attention is recomputed, though its results are small for the time that they take."""
    if not evidence.on_gpu:
        raise NotApplicable("The tensors are in the host's memory, which other programs share.")
    if not evidence.has_shapes:
        raise NotApplicable(
            "The trace has no input shapes: record with `recompute-scan run`, or with "
            "record_shapes=True."
        )
    cost = evidence.cost
    if cost is None:
        raise NotApplicable("The step time is unknown, so a saving cannot be computed.")
    kept = evidence.kept_attention
    if kept is None or kept.saving_ms < WORTH * cost.predicted_step_ms:
        return
    share = 100 * kept.saving_ms / cost.step_ms
    stacks = [region.checkpoints for region in evidence.regions if region.checkpoints]
    stack = max(stacks, key=stacks.count, default=())
    yield selective_checkpoint.finding(
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


def describe_decided(policy: WatchedPolicy) -> tuple[str, ...]:
    """The policy and its checkpoint, as lines of evidence."""
    asked = plural(policy.regions, "region")
    return (
        f"policy: {policy.name}{place(policy.defined)}",
        f"checkpoint: {policy.mechanism or 'unknown'}{place(policy.site)}, {asked}",
    )


def overloads_met(policy: WatchedPolicy, entry: PolicyEntry) -> list[DecidedOperator]:
    """The operators that were called under an entry's name, whatever their overload."""
    if entry.kind == "packet":
        return [one for one in policy.operators if one.name.startswith(f"{entry.name}.")]
    return [one for one in policy.operators if one.name == entry.name]


def _dear(evidence: Evidence) -> Iterator[tuple[WatchedPolicy, DecidedOperator, float, float]]:
    """Operators with recomputes that take enough of a step: the policy, the operator, the time of
    its recomputes per step in ms and in per cent.
    """
    cost = evidence.cost
    if cost is None:
        raise NotApplicable("There is no step time to compare with.")
    for policy in evidence.decided:
        for one in policy.operators:
            if (time := one.recompute_ms_per_step or 0.0) >= WORTH * cost.step_ms:
                yield policy, one, time, 100 * time / cost.step_ms


# The fix that lets a policy keep one more operator.
keep_too = partial(review, keep="what the policy keeps already", remove="", docs=SELECTIVE_DOCS)


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


@partial(Rule, "RS501", "policy-matches-nothing", severity="warning", needs="policies")
def policy_matches_nothing(evidence: Evidence) -> Iterator[Finding]:
    """A policy of a selective checkpoint was asked, and kept nothing."""
    for policy in evidence.decided:
        if policy.met and not policy.kept and not policy.raised:
            yield _keeps_nothing(evidence, policy)


def _keeps_nothing(evidence: Evidence, policy: WatchedPolicy) -> Finding:
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
    return policy_matches_nothing.finding(
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


@partial(Rule, "RS502", "entry-never-met", needs="policies")
def entry_never_met(evidence: Evidence) -> Iterator[Finding]:
    """A policy of the user's names an operator that it never meets, and others that it keeps."""
    for policy in evidence.decided:
        missed = _missed(policy)
        if evidence.compiled_calls_again:  # a policy sees no operator of compiled code
            missed = [entry for entry in missed if entry.met]
        if policy.own and policy.kept and missed:
            yield _never_met(evidence, policy, missed)


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


def _never_met(evidence: Evidence, policy: WatchedPolicy, missed: list[PolicyEntry]) -> Finding:
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
    return entry_never_met.finding(
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


@partial(Rule, "RS503", "expensive-op-not-listed", needs="policies")
def expensive_op_not_listed(evidence: Evidence) -> Iterator[Finding]:
    """An operator that a policy leaves out costs more for its bytes than one that it keeps."""
    for policy, one, time, part in _dear(evidence):
        if not _left_out(policy, one):
            continue
        yield expensive_op_not_listed.finding(
            evidence,
            confidence=predicted(evidence),
            title=f"{one.name} is recomputed under the policy {policy.name}, "
            f"for {ms(time)} per step",
            detail=(
                f"That is {pct(part)} of the step; kept, its {plural(one.met, 'result')} would "
                f"take {size(one.result_bytes)}. Per byte, that costs more time than at least one "
                "operator that the policy keeps."
            ),
            evidence=(
                *describe_decided(policy),
                f"{one.name}: met {one.met} times, recomputed {one.recomputed} times",
            ),
            fix=keep_too(
                summary=f"Keep torch.ops.{one.name} too, if its {size(one.result_bytes)} fit.",
                reason="It takes memory.",
            ),
            saving_ms=time,
            saving_pct=part,
        )


# Of what the policy keeps, so much at least.
_MUCH = 0.01


@partial(Rule, "RS504", "keep-buys-nothing", needs="policies")
def keep_buys_nothing(evidence: Evidence) -> Iterator[Finding]:
    """A policy keeps results that no recompute asks for."""
    for policy in evidence.decided:
        if useless := [one for one in policy.operators if _useless(policy, one)]:
            yield _kept_for_nothing(evidence, policy, useless)


def _useless(policy: WatchedPolicy, one: DecidedOperator) -> bool:
    """Were its results kept in memory, and did no recompute ask for one?

    Known only where every region was recomputed: one with its backward still to come may ask.
    """
    enough = one.kept_bytes > _MUCH * policy.kept_bytes
    return enough and not one.served and policy.recomputes >= policy.regions > 0


def _kept_for_nothing(
    evidence: Evidence, policy: WatchedPolicy, useless: list[DecidedOperator]
) -> Finding:
    together = sum(one.kept_bytes for one in useless)
    names = ", ".join(one.name for one in useless)
    return keep_buys_nothing.finding(
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


@partial(Rule, "RS505", "recompute-buys-nothing", needs="policies")
def recompute_buys_nothing(evidence: Evidence) -> Iterator[Finding]:
    """An operator is recomputed though its result was in memory all the time."""
    for policy, one, time, part in _dear(evidence):
        # All that it returned was there still when the backward pass began.
        if not (one.recomputed >= one.met > 0 and 0 < one.result_bytes == one.held_bytes):
            continue
        held = size(one.held_bytes)
        yield recompute_buys_nothing.finding(
            evidence,
            confidence=predicted(evidence),
            title=f"Recomputing {one.name} costs {ms(time)} per step and frees nothing",
            detail=(
                f"Its {plural(one.met, 'result')} ({held}) were all in memory when the backward "
                "pass began, because something else holds them: the next block's input, or a "
                "variable. If the policy kept them, they would take no further memory."
            ),
            evidence=(
                *describe_decided(policy),
                f"{one.name}: {size(one.result_bytes)} returned, {held} still there",
            ),
            fix=keep_too(
                summary=f"Keep torch.ops.{one.name} too: its results are in memory anyway.",
                reason="Other calls of the operator may have results that are freed today.",
            ),
            saving_ms=time,
            saving_pct=part,
        )
