"""Hugging Face transformers' own checkpointing, switched on by the user's own code.

``PreTrainedModel.gradient_checkpointing_enable`` (since 5.23 ``activation_checkpointing_enable``,
of which the former is an alias). Up to 4.51 the model's loop over its layers asks, outside a
wrapper around the layer; from 4.52 ``GradientCheckpointingLayer`` does, inside it.
"""

from __future__ import annotations

from msgspec.structs import replace

from recompute_scan.frameworks.mechanism import Before, Edit, Mechanism, Rename

# What all share that switch it on.
BASE = Mechanism(
    name="hf-gradient-checkpointing",
    title="Hugging Face's gradient_checkpointing_enable",
    keep=50,
    why_keep="it is the model's own, and nothing else checkpoints its layers",
    remove="delete the gradient_checkpointing_enable(…) call",
    renames=(
        Rename(
            "transformers",
            "5.23",
            "gradient_checkpointing_enable",
            "activation_checkpointing_enable",
        ),
    ),
    docs="https://huggingface.co/docs/transformers/main/en/fsdp",
    packages=("transformers",),
    checked="ran here (transformers 5.23.0)",
    variants=(
        "transformers < 5.0: reentrant (explicit from 4.38, by torch's default before)",
        "transformers >= 5.0: non-reentrant",
    ),
    caution=(
        "Keep use_cache=False: the removed switch turned the KV cache off, and a recompute fails "
        "on a cache that grew."
    ),
    asks=(
        "transformers/modeling_layers.py:*",
        "transformers/models/*/modeling_*.py:*",
        "transformers_modules/*modeling_*.py:*",
    ),
    switches=(
        "transformers.modeling_utils:PreTrainedModel.gradient_checkpointing_enable",
        "transformers.modeling_utils:PreTrainedModel.activation_checkpointing_enable",
    ),
    edits=(
        Edit("gradient_checkpointing_enable", "delete"),
        Edit("activation_checkpointing_enable", "delete"),
    ),
)
MECHANISM = replace(
    BASE,
    fewer="set gradient_checkpointing = False on {layers} once it is on for the model",
    fewer_before=(
        Before(
            "transformers",
            "4.52",
            "the layers have no flag of their own before transformers 4.52: wrap the others in "
            "checkpoint_wrapper, and not {layers}",
        ),
    ),
    selectively=(
        'gradient_checkpointing_enable(gradient_checkpointing_kwargs={{"use_reentrant": False, '
        '"context_fn": {context}}})'
    ),
)
