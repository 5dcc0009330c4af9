"""RS401 to RS406: recomputes that differ from their forward.

The same fault in many blocks makes one finding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

from msgspec import Struct

from recompute_scan.advise.choice import edited, place
from recompute_scan.annotations import CHECK_OFF
from recompute_scan.findings.base import Evidence, Rule, Severity, review
from recompute_scan.frameworks.base import Edit
from recompute_scan.result import Finding, Fix, Level
from recompute_scan.result.fidelity import (
    ComparedRegion,
    Difference,
    DifferenceKind,
    KeptState,
    LostGradient,
    Operation,
    WhyLost,
)
from recompute_scan.result.patch import change_diff
from recompute_scan.units import first_few, ms

# The command that makes sure; ``run`` offers it.
COMPARE = (
    "Whether gradients are wrong shows when they are compared with those without checkpoints: "
    "recompute-scan run --verify --without-checkpointing does that."
)
_MOST_NAMED = 3


class Fault(Struct, frozen=True):
    """One difference, and the blocks that have it.

    Attributes:
        difference: As the first of the blocks has it.
        regions: The blocks.
        compared: How many blocks were compared in all.
    """

    difference: Difference
    regions: tuple[ComparedRegion, ...]
    compared: int

    @property
    def blocks(self) -> str:
        """``12 of 12 blocks``."""
        return count_blocks(len(self.regions), self.compared)

    def shown(self) -> tuple[str, ...]:
        """Lines of evidence: the operator, how far off it is, the checkpoint, the blocks."""
        apart = self.difference.distance
        far = () if apart is None else (f"first result that differs: {_percent(apart)}",)
        return (describe_operation(self.difference.operation), *far, *name_blocks(self.regions))


def count_blocks(some: int, of: int) -> str:
    """``3 of 12 blocks``; ``1 of 1 block``."""
    return f"{some} of {of} block{'s' * (of != 1)}"


def _differing(
    rule: Rule,
    seen: Evidence,
    regions: Collection[ComparedRegion],
    title: str,
    detail: str,
    **others: Any,
) -> Finding:
    """A finding on differing recomputes of these blocks; it ends with their effect on gradients."""
    severity, confidence, sentence = _effect(seen, regions)
    return rule.finding(
        seen,
        title,
        f"{detail} {sentence}",
        severity=severity,
        confidence=confidence,
        wrong_gradients=severity != "info",
        **others,
    )


def _effect(evidence: Evidence, regions: Collection[ComparedRegion]) -> tuple[Severity, Level, str]:
    """The effect of differing recomputes on gradients: how bad, how sure, in words."""
    compared = evidence.gradients
    told = {compared.tell(region) for region in regions} if compared is not None else {None}
    if compared is None or (told - {"equal", "different"} and "different" not in told):
        return "warning", "medium", COMPARE
    if "different" in told:
        some = compared.differing
        return (
            "error",
            "high",
            f"Gradients are wrong: after the first step {len(some)} of {compared.number} differ "
            f"from those without checkpoints ({first_few(some, _MOST_NAMED)}), and nothing fails.",
        )
    bits = "to the last bit" if compared.equal else "up to rounding"
    return (
        "info",
        "high",
        f"It changes no gradient of the first step: all {compared.number} are equal {bits} with "
        "and without checkpoints.",
    )


# A rule on recomputes that change what is trained.
_rule = partial(Rule, severity="error", needs="comparison", wrong_gradients=True)


def _faults(evidence: Evidence, *kinds: DifferenceKind) -> list[Fault]:
    """The differences of these kinds, each with all blocks that have it."""
    compared = evidence.compared
    found: dict[object, list[tuple[Difference, ComparedRegion]]] = defaultdict(list)
    for region in compared:
        for one in region.differences:
            if one.kind in kinds:
                cause = one.operation
                same = one.kind, cause.name, cause.site, one.generator, region.site
                found[same].append((one, region))
    return [
        Fault(some[0][0], tuple(region for _, region in some), len(compared))
        for some in found.values()
    ]


def describe_operation(operation: Operation) -> str:
    """``aten.bernoulli_ in layers.0.drop (Dropout) at train.py:12``."""
    kind = f" ({operation.module_class})" if operation.module_class else ""
    inside = f" in {operation.module}{kind}" if operation.module else kind
    site = (operation.site or "").rpartition("/site-packages/")[2]
    return f"{operation.name}{inside}{place(site)}"


def name_blocks(regions: Collection[ComparedRegion]) -> tuple[str, ...]:
    """The first few blocks, with the checkpoint around them, as lines of evidence."""
    lines = [
        f"{region.module or region.module_class or 'a function'}: {region.variant}"
        f"{place(region.site)}"
        for region in list(regions)[:_MOST_NAMED]
    ]
    more = len(regions) - _MOST_NAMED
    return (*lines, f"and {more} more") if more > 0 else tuple(lines)


def set_back(evidence: Evidence, site: str, option: str, default: str) -> str | None:
    """The checkpoint's option at its default, as a diff of the call site; ``None`` where that
    does not name it.
    """
    source = evidence.sources.get(site)
    if source is None:
        return None
    new = edited(
        source, (Edit("*", "keyword", option, default), Edit("*", "entry", option, default))
    )
    return change_diff(site, source, new) if new is not None else None


def _percent(share: float) -> str:
    if share > 10:
        return "by more than ten times its norm"
    if share >= 1:
        return f"by {share:.1f} times its norm"
    return f"by {share * 100:.2g} % of its norm"


@partial(_rule, "RS401", "random-state-not-restored")
def random_state_not_restored(evidence: Evidence) -> Iterator[Finding]:
    """A recompute draws other random numbers than the forward that it repeats."""
    for fault in _faults(evidence, "random"):
        effect = "if the operator uses random numbers, the gradient does not match the loss"
        if fault.difference.distance:
            effect = "its result differs, and a gradient computed from it does not match the loss"
        where = describe_operation(fault.difference.operation)
        yield _differing(
            random_state_not_restored,
            evidence,
            fault.regions,
            title=f"Recomputes of {fault.blocks} start from another random state than their "
            "forward",
            detail=(
                f"{where} starts from a different state of {fault.difference.generator} in the "
                f"recompute than in the forward: {effect}."
            ),
            evidence=fault.shown(),
            fix=_fix(evidence, fault),
        )


def _fix(evidence: Evidence, fault: Fault) -> Fix:
    generator = fault.difference.generator or ""
    diff = None
    if generator.startswith("torch"):
        site = next((region.site for region in fault.regions if region.site), "")
        diff = set_back(evidence, site, "preserve_rng_state", "True")
        summary = "Keep the random state: preserve_rng_state=True, which is torch's default."
        keep = (
            "the checkpoint; a checkpoint function that you wrote must save torch's random state "
            "in its forward, restore it for the recompute, and then put back the later state"
        )
        remove = "preserve_rng_state=False"
    else:
        summary = (
            f"No checkpoint keeps the state of {generator}. Draw the block's random numbers "
            "outside the block and pass them in, or draw them from torch's default generator."
        )
        keep = "the checkpoint"
        remove = f"the call inside the block that draws from {generator}"
    return review(
        summary=summary,
        diff=diff,
        keep=keep,
        remove=remove,
        reason=f"The fix changes gradients: they then match the loss.{_price(evidence)}",
    )


def _price(evidence: Evidence) -> str:
    """The time to keep the state, where it was measured."""
    took = evidence.fidelity.keeping_ms if evidence.fidelity is not None else None
    if took is None:
        return ""
    return f" Keeping the random state takes about {ms(took)} of a step here."


@partial(_rule, "RS402", "recompute-in-other-type")
def recompute_in_other_type(evidence: Evidence) -> Iterator[Finding]:
    """A recompute works in another number type than the forward that it repeats."""
    for fault in _faults(evidence, "type"):
        there, here = fault.difference.forward, fault.difference.recompute
        yield _differing(
            recompute_in_other_type,
            evidence,
            fault.regions,
            title=f"Recomputes of {fault.blocks} work in {here}, their forward in {there}",
            detail=(
                f"{describe_operation(fault.difference.operation)} gives {here} in the recompute "
                f"and {there} in the forward. A context that was entered around the forward, such "
                "as autocast or an FP8 recipe, is not active when the backward pass runs the "
                "forward again."
            ),
            evidence=fault.shown(),
            fix=review(
                summary=(
                    "Enter the context inside the checkpointed function, so that the recompute "
                    "enters it too. torch's own checkpoint restores torch.autocast; one that is "
                    "written by hand has to do that itself, and a library's recipe is restored by "
                    "the library's checkpoint only."
                ),
                remove="nothing",
                reason="The fix changes gradients: they are computed in the forward's type.",
            ),
        )


@partial(_rule, "RS403", "recompute-differs")
def recompute_differs(evidence: Evidence) -> Iterator[Finding]:
    """A recompute computes something other than the forward that it repeats."""
    for fault in _faults(evidence, "input", "argument", "shape", "operators", "value"):
        why, what_to_do = _why_and_what_to_do(fault.difference)
        yield _differing(
            recompute_differs,
            evidence,
            fault.regions,
            title=f"Recomputes of {fault.blocks} compute something other than their forward",
            detail=why,
            evidence=fault.shown(),
            fix=review(
                summary=what_to_do,
                remove="what changes between the forward and the backward pass",
                reason="The fix changes gradients: they then match the loss.",
            ),
        )


def _why_and_what_to_do(difference: Difference) -> tuple[str, str]:
    where = describe_operation(difference.operation)
    here, there = difference.recompute, difference.forward
    decide = (
        "Decide outside the block and pass the decision in as an argument, which the checkpoint "
        "keeps: no counter, flag or global that a call of the block changes."
    )
    found = {
        "input": (
            f"{where} gets a tensor that no operator of the block made and that has changed since "
            "the forward: it was written to or replaced before the recompute, or Python code "
            "makes a new one in each call.",
            "Do not change the block's inputs, weights or buffers before the backward pass. Update "
            "buffers, and create tensors that differ from call to call, outside the block. "
            "functional_call puts the weights back when it returns: call it inside the block.",
        ),
        "argument": (
            f"{where} is called with {here} where the forward had {there}: the block depends on a "
            "value that changes from call to call.",
            decide,
        ),
        "shape": (
            f"{where} returned the shape {here}, and {there} in the forward: something that the "
            "block uses has grown or shrunk.",
            "Leave caches out of checkpointed blocks: use_cache=False in training, and nothing "
            "appended to what outlives the call.",
        ),
        "operators": (
            f"The recompute calls {where}, where the forward had "
            f"{difference.instead_of or 'nothing more'}: another branch was taken.",
            decide,
        ),
        "value": (
            f"{where} gets the same inputs and gives a different result.",
            "Find what the operator depends on besides its arguments; `run --verify` compares the "
            "gradients.",
        ),
    }
    return found[difference.kind]


_MOST_SHOWN = 6


@partial(_rule, "RS404", "buffer-updated-twice", severity="warning")
def buffer_updated_twice(evidence: Evidence) -> Iterator[Finding]:
    """A recompute updates buffers, or attributes of modules, that the forward has updated already.

    One finding for all buffers, and one for all attributes.
    """
    if any(region.updates for region in evidence.compared):
        yield _of_buffers(evidence)
    if any(not state.is_buffer for region in evidence.compared for state in region.states):
        yield _of_attributes(evidence)


def _states(evidence: Evidence, *, buffers: bool) -> list[tuple[ComparedRegion, KeptState]]:
    return [
        (region, state)
        for region in evidence.compared
        for state in region.states
        if state.is_buffer == buffers
    ]


def _of_buffers(evidence: Evidence) -> Finding:
    found = _states(evidence, buffers=True)
    updated, buffers = list(dict.fromkeys(one for one, _ in found)), [one for _, one in found]
    blocks = count_blocks(len(updated), len(evidence.compared))
    title = f"Recomputes of {blocks} update buffers once more"
    only_counts = all(buffer.name.endswith("num_batches_tracked") for buffer in buffers)
    detail = (
        "A recompute counts and averages again what a module counts or averages in its forward: "
        "token counts double, and running statistics follow the latest batch faster than momentum "
        "says. Gradients are wrong too where the block reads what it updates, which is reported as "
        "RS403."
    )
    if only_counts:
        detail = (
            "A recompute counts each batch again. BatchNorm reads this count where its momentum is "
            "None, and nowhere else."
        )
    fix = review(
        summary=(
            "Update such buffers outside the checkpointed block, or not in a recompute: for "
            "BatchNorm leave the layer outside the checkpoint; where the model library has a "
            "switch for it, use that."
        ),
        keep="the checkpoint around everything else",
        remove="the module that keeps the buffer from the checkpointed block",
        reason="The fix changes running statistics and counters, and so what evaluation uses.",
    )
    return buffer_updated_twice.finding(
        evidence,
        severity="info" if only_counts else None,
        confidence="high",
        wrong_gradients=False if only_counts else None,
        title=title,
        detail=detail,
        evidence=(*map(_change, buffers[:_MOST_SHOWN]), *name_blocks(updated)),
        fix=None if only_counts else fix,
    )


def _of_attributes(evidence: Evidence) -> Finding:
    found = _states(evidence, buffers=False)
    changed, states = list(dict.fromkeys(one for one, _ in found)), [one for _, one in found]
    return buffer_updated_twice.finding(
        evidence,
        severity="warning" if any(state.is_tensor for state in states) else "info",
        confidence="high",
        wrong_gradients=False,
        title=(
            f"Recomputes of {count_blocks(len(changed), len(evidence.compared))} count or collect "
            f"once more in {states[0].name}"
            + (f" and {len(states) - 1} other attributes" if len(states) > 1 else "")
        ),
        detail=(
            "When its forward runs, a module counts or collects something outside of its "
            "buffers, and the recompute does so again. Where a result of the compared step "
            "depends on it, RS403 says so; a later step can depend on it too, as on a schedule "
            "that counts calls."
        ),
        evidence=(*map(_change, states[:_MOST_SHOWN]), *name_blocks(changed)),
        fix=review(
            summary=(
                "Count or collect outside the checkpointed block, or accept that every call "
                "counts twice."
            ),
            remove="the counting or collecting from the checkpointed block",
            reason="Counts and collections change, and what later steps compute from them.",
        ),
    )


def _change(state: KeptState) -> str:
    return (
        f"{state.name}: {state.before} before the step, {state.forward} after the forward, "
        f"{state.recompute} after the recompute"
    )


# Title, with a place for the blocks; detail; summary of the fix.
_LOST: dict[WhyLost, tuple[str, str, str]] = {
    "grad-mode-off": (
        "Recomputes of {} run without autograd: their weights get no gradient",
        "The checkpoint function runs the block again while autograd is off, as it is in the "
        "backward of an autograd function. Nothing is differentiated, and nothing fails.",
        "Run the recompute under torch.enable_grad(), as torch.utils.checkpoint does.",
    ),
    "left-without": (
        "Tensors returned by {} leave the checkpoint without their gradient",
        "A reentrant checkpoint gives a gradient to the tensors that it returns directly (return "
        "a, b), and to no tensor nested in a tuple, a list, a dictionary or an object, or kept in "
        "an attribute. The loss depends on such a tensor: what it was computed from is not "
        "trained by that part of the loss, and nothing fails.",
        "Use torch.utils.checkpoint.checkpoint(…, use_reentrant=False), which gives every "
        "tensor its gradient, or return these tensors directly.",
    ),
    "arrives-otherwise": (
        "Recomputes of {} run backward from another gradient than the function gets",
        "The autograd function returns its block's results, so its recompute must run backward "
        "from the whole gradient that the function gets. It runs from a scaled gradient, or from "
        "a part of it.",
        "Run backward from the block's results with the gradient that backward gets.",
    ),
    "returned-otherwise": (
        "The function around {} returns a different gradient than its recompute gives",
        "The recompute gives the block's input one gradient, and the autograd function returns a "
        "different one, which trains everything before the block.",
        "Return the gradient that the recompute gives for the block's input.",
    ),
    "weights-left-out": (
        "Weights of {} get no gradient from their recompute",
        "The autograd function runs its block again and asks for the gradients of the inputs "
        "alone, as torch.autograd.grad(output, inputs) does. The weights inside get none.",
        "Call torch.autograd.backward(output, gradient) on the recompute, as "
        "torch.utils.checkpoint does, or add the weights' gradients to theirs.",
    ),
    "detached": (
        "Recomputes of {} are cut off from a tensor that needs a gradient",
        "The block uses a tensor that needs a gradient; in the recompute it is a copy that "
        "needs none, so that what comes before it is not trained through this block. That "
        "happens to tensors that are not positional arguments of the checkpoint function.",
        "Pass the tensor by position, as the checkpoint function takes them, or use "
        "torch.utils.checkpoint.checkpoint(…, use_reentrant=False), which takes keywords.",
    ),
}


@partial(_rule, "RS405", "gradient-lost")
def gradient_lost(evidence: Evidence) -> Iterator[Finding]:
    """A tensor that needs a gradient gets none, because the recompute is cut off from it."""
    found: dict[WhyLost, list[tuple[ComparedRegion, LostGradient]]] = defaultdict(list)
    for region in evidence.entered:
        for lost in region.lost:
            found[lost.why].append((region, lost))
    compared = len(evidence.compared)
    for why, some in found.items():
        regions = list(dict.fromkeys(region for region, _ in some))
        of = max(compared, len(regions)) if why == "left-without" else compared
        title, detail, summary = _LOST[why]
        yield _differing(
            gradient_lost,
            evidence,
            regions,
            title=title.format(count_blocks(len(regions), of)),
            detail=detail,
            evidence=(
                *dict.fromkeys(_line(lost) for _, lost in some[:_MOST_SHOWN]),
                *name_blocks(regions),
            ),
            fix=review(
                summary=summary,
                remove="nothing",
                reason="Weights that were not trained are trained after this change.",
            ),
        )


def _line(lost: LostGradient) -> str:
    weights = first_few(lost.weights, _MOST_SHOWN)
    used = describe_operation(lost.operation)
    if lost.why == "left-without":
        without = f"; no gradient at all: {weights}" if weights else ""
        return f"{lost.name or 'a tensor that the block keeps'}, first used by {used}{without}"
    if lost.why in ("arrives-otherwise", "returned-otherwise", "weights-left-out"):
        return used + (f": no gradient for {weights}" if weights else "")
    return f"{lost.name or 'a tensor from outside the block'}, used by {used}"


_SWITCH = "determinism_check"


@partial(Rule, "RS406", "determinism-check-off", needs="comparison")
def determinism_check_off(evidence: Evidence) -> Iterator[Finding]:
    """Recomputes that torch does not check against their forward, by a setting."""
    off: dict[str, list[ComparedRegion]] = defaultdict(list)
    for region in evidence.compared:
        if CHECK_OFF in region.options:
            off[region.site].append(region)
    for site, regions in off.items():
        blocks = count_blocks(len(regions), len(evidence.compared))
        yield determinism_check_off.finding(
            evidence,
            title=f"Recomputes of {blocks} are not checked by torch",
            detail=(
                "A non-reentrant checkpoint compares the shapes and types of the tensors that a "
                "recompute saves with the forward's, and raises where they differ; "
                f'{_SWITCH}="none" switches that off. A recompute that takes another way then '
                f"gives wrong gradients in silence. {_here(regions)}"
            ),
            evidence=name_blocks(regions),
            fix=review(
                summary=f"Leave {_SWITCH} at its default.",
                diff=set_back(evidence, site, _SWITCH, '"default"'),
                remove=f'{_SWITCH}="none"',
                reason=(
                    "Gradients stay the same, but the backward pass raises an error if a recompute "
                    "differs in shape or type. Leave the check off only if that difference is "
                    "intended."
                ),
            ),
        )


def _here(regions: list[ComparedRegion]) -> str:
    """A sentence on the compared step of these."""
    if any(region.differs for region in regions):
        return "Here recomputes do differ, as another finding says."
    if any(region.untold for region in regions):
        return "For some blocks it is not known whether recomputes differ."
    return "In the compared step no recompute differed."
