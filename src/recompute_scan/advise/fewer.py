"""How to checkpoint fewer layers, or less of each: the setting of the framework found."""

from __future__ import annotations

from collections.abc import Sequence

from recompute_scan.advise.choose import kept
from recompute_scan.advise.wording import UNKNOWN_RUN, RunFacts, title_of, worded
from recompute_scan.frameworks.known import find_mechanism
from recompute_scan.result import Checkpoint, Fix

_GENERAL_DOCS = "https://docs.pytorch.org/docs/stable/checkpoint.html"
_SELECTIVE_DOCS = (
    "https://docs.pytorch.org/docs/stable/checkpoint.html"
    "#torch.utils.checkpoint.create_selective_checkpoint_contexts"
)
# Settings that take single layers; for all others the words of `_ELSE` say what to do.
_FEWER = {
    "fsdp-wrapper": "let the check_fn of apply_activation_checkpointing refuse {layers}",
    "hf-gradient-checkpointing": (
        "set gradient_checkpointing = False on {layers} once it is on for the model"
    ),
    "torch-checkpoint": "call {layers} directly instead of through checkpoint(…)",
    "composable-checkpoint": "do not apply checkpoint(module) to {layers}",
}
# Before this version of transformers a model's layers have no flag of their own.
_FLAGS_OF_LAYERS = "4.52"
_ELSE = "leave {layers} out of {title}"
_OLD = {
    "hf-gradient-checkpointing": (
        "the layers have no flag of their own before transformers 4.52: wrap the others in "
        "checkpoint_wrapper, and not {layers}"
    ),
}
_SELECTIVE = {
    "fsdp-wrapper": "pass context_fn={context} to checkpoint_wrapper",
    "hf-gradient-checkpointing": (
        'gradient_checkpointing_enable(gradient_checkpointing_kwargs={{"use_reentrant": False, '
        '"context_fn": {context}}})'
    ),
    "torch-checkpoint": "checkpoint(…, use_reentrant=False, context_fn={context})",
    "composable-checkpoint": "checkpoint(module, context_fn={context})",
}
_SELECTIVE_ELSE = (
    "switch {title} to its selective mode, or use checkpoint(…, use_reentrant=False, "
    "context_fn={context}) in its place"
)


def advise_fewer(
    checkpoints: Sequence[Checkpoint], layers: str, whole: bool, run: RunFacts = UNKNOWN_RUN
) -> Fix:
    """What to change so that these layers are not checkpointed.

    Args:
        checkpoints: Those around each of the layers.
        layers: The layers, in words.
        whole: Whether no other layer is checkpointed.
        run: What else is known of the run.
    """
    checkpoint = kept(checkpoints, sharded=run.sharded)
    title = title_of(checkpoint)
    mechanism = find_mechanism(checkpoint.mechanism)
    template = _FEWER.get(checkpoint.mechanism or "", _ELSE)
    if template is not _ELSE and run.has("transformers", _FLAGS_OF_LAYERS) is False:
        template = _OLD.get(checkpoint.mechanism or "", template)
    setting = template.format(layers=layers, title=title)
    if whole and mechanism is not None:
        setting = worded(mechanism.remove, mechanism, run)
    where = f" ({checkpoint.call_site})" if checkpoint.call_site else ""
    return Fix(
        summary=f"Stop checkpointing {layers}: {setting}{where}.",
        disposition="review",
        diff=None,
        keep="no checkpoint at all" if whole else f"{title} for all other layers",
        remove=f"{title} for {layers}",
        docs=mechanism.docs if mechanism else _GENERAL_DOCS,
    )


def advise_selective(
    checkpoints: Sequence[Checkpoint], operators: Sequence[str], run: RunFacts = UNKNOWN_RUN
) -> Fix:
    """What to change so that the results of these operators are kept.

    Args:
        checkpoints: Those around each layer.
        operators: Names as the profiler has them, ``aten::_flash_attention_forward``.
        run: What else is known of the run.
    """
    checkpoint = kept(checkpoints, sharded=run.sharded)
    listed = ", ".join(f"torch.ops.{name.replace('::', '.')}.default" for name in operators)
    context = f"functools.partial(create_selective_checkpoint_contexts, [{listed}])"
    title = title_of(checkpoint)
    template = _SELECTIVE.get(checkpoint.mechanism or "", _SELECTIVE_ELSE)
    return Fix(
        summary=template.format(title=title, context=context) + ".",
        disposition="review",
        diff=None,
        keep="everything else in the layers recomputed as it is; the checkpoint must be "
        "non-reentrant (torch 2.5 and newer)",
        remove="nothing",
        docs=_SELECTIVE_DOCS,
    )
