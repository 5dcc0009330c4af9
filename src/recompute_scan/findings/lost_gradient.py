"""RS405: a tensor that needs a gradient gets none, because the recompute is cut off from it."""

from __future__ import annotations

from collections import defaultdict

from recompute_scan.faithful import ComparedRegion, LostGradient
from recompute_scan.findings.base import Answer, Rule
from recompute_scan.findings.differences import (
    CHECKPOINT_DOCS,
    consequence,
    count_blocks,
    describe_operation,
    name_blocks,
)
from recompute_scan.findings.evidence import RunEvidence
from recompute_scan.result import Finding, Fix

_MOST_SHOWN = 6


def check(evidence: RunEvidence) -> Answer:
    """One finding for each way in which gradients are lost."""
    found: dict[str, list[tuple[ComparedRegion, LostGradient]]] = defaultdict(list)
    for region in evidence.regions:
        for lost in region.lost:
            found[lost.why].append((region, lost))
    compared = len(evidence.compared)
    return [_finding(evidence, why, some, compared) for why, some in found.items()]


def _finding(
    evidence: RunEvidence, why: str, some: list[tuple[ComparedRegion, LostGradient]], compared: int
) -> Finding:
    regions = list(dict.fromkeys(region for region, _ in some))
    blocks = count_blocks(len(regions), compared)
    if why == "grad-mode-off":
        title = f"Recomputes of {blocks} run without autograd: their weights get no gradient"
        detail = (
            "The checkpoint function runs the block again while autograd is off, as it is in the "
            "backward of an autograd function. Nothing is differentiated, and nothing fails."
        )
        summary = "Run the recompute under torch.enable_grad(), as torch.utils.checkpoint does."
    elif why == "left-without":
        count = count_blocks(len(regions), max(compared, len(regions)))
        title = f"What {count} return leaves the checkpoint without its gradient"
        detail = (
            "A reentrant checkpoint gives a gradient to the tensors that it returns side by side, "
            "and to no tensor inside a tuple, a list, a dictionary or an object, or kept in an "
            "attribute. The loss depends on such a tensor: what it was computed from is not "
            "trained by that part of the loss, and nothing fails."
        )
        summary = (
            "Use torch.utils.checkpoint.checkpoint(…, use_reentrant=False), which gives every "
            "tensor its gradient, or return these tensors side by side."
        )
    elif why == "arrives-otherwise":
        title = f"Recomputes of {blocks} run backward from another gradient than the function gets"
        detail = (
            "The autograd function returns what its block returns. So the gradient that its "
            "backward gets has to arrive, whole, at what the block returns when it runs again. "
            "Another one arrives there: one that is scaled, or a part of it."
        )
        summary = "Run backward from the block's results with the gradient that backward gets."
    elif why == "returned-otherwise":
        title = f"The function around {blocks} returns another gradient than its recompute gives"
        detail = (
            "Behind the recompute, the block's input has one gradient, and the autograd function "
            "returns another one: what comes before the block is trained by that."
        )
        summary = "Return the gradient that the recompute gives for the block's input."
    elif why == "weights-left-out":
        title = f"Weights of {blocks} get no gradient from their recompute"
        detail = (
            "The autograd function runs its block again and asks for the gradients of the inputs "
            "alone, as torch.autograd.grad(output, inputs) does. The weights inside get none."
        )
        summary = (
            "Call torch.autograd.backward(output, gradient) on the recompute, as "
            "torch.utils.checkpoint does, or add the weights' gradients to theirs."
        )
    else:
        title = f"Recomputes of {blocks} are cut off from a tensor that needs a gradient"
        detail = (
            "The block uses a tensor that needs a gradient; in the recompute it is a copy that "
            "needs none, so that what comes before it is not trained through this block. That "
            "happens to tensors that the checkpoint function does not take as arguments of its "
            "own, such as keywords."
        )
        summary = (
            "Pass the tensor by position, as the checkpoint function takes them, or use "
            "torch.utils.checkpoint.checkpoint(…, use_reentrant=False), which takes keywords."
        )
    then = consequence(evidence, regions)
    return RULE.finding(
        evidence,
        severity=then.severity,
        confidence=then.confidence,
        wrong_gradients=then.wrong_gradients,
        title=title,
        detail=f"{detail} {then.sentence}",
        evidence=(
            *dict.fromkeys(_line(lost) for _, lost in some[:_MOST_SHOWN]),
            *name_blocks(regions),
        ),
        fix=Fix(
            summary=summary,
            disposition="review",
            diff=None,
            keep="the checkpoint",
            remove="nothing",
            docs=CHECKPOINT_DOCS,
            reason="Weights that were not trained are trained from here on.",
        ),
    )


def _line(lost: LostGradient) -> str:
    if lost.why == "left-without":
        named = ", ".join(lost.weights[:_MOST_SHOWN])
        more = len(lost.weights) - _MOST_SHOWN
        without = f"; no gradient at all: {named}{f' and {more} more' if more > 0 else ''}"
        what = lost.name or "a tensor that the block keeps"
        used = describe_operation(lost.operation)
        return f"{what}, first used by {used}{without if named else ''}"
    if lost.why in ("arrives-otherwise", "returned-otherwise", "weights-left-out"):
        named = ", ".join(lost.weights[:_MOST_SHOWN])
        more = len(lost.weights) - _MOST_SHOWN
        without = f": no gradient for {named}{f' and {more} more' if more > 0 else ''}"
        return f"{describe_operation(lost.operation)}{without if named else ''}"
    what = lost.name or "a tensor from outside the block"
    return f"{what}, used by {describe_operation(lost.operation)}"


RULE = Rule(
    "RS405",
    "gradient-lost",
    check_run=check,
    severity="error",
    needs="comparison",
    wrong_gradients=True,
)
