"""Hugging Face transformers: a model's own checkpointing, and what its ``Trainer`` switches on.

``PreTrainedModel.gradient_checkpointing_enable`` (since 5.23 ``activation_checkpointing_enable``,
of which the former is an alias). Up to 4.51 the model's loop over its layers asks, outside a
wrapper around the layer; from 4.52 ``GradientCheckpointingLayer`` does, inside it.

``transformers/trainer.py`` enables that when training begins, or has FSDP's wrapper applied. Since
4.33 it refuses both arguments together, and sees nothing that the script switched on itself.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from recompute_scan.frameworks import pytorch
from recompute_scan.frameworks.base import Before, Edit, Mechanism, Rename
from recompute_scan.frameworks.detect import Signature

_TRAINER = ("transformers/trainer.py:*",)
_ARGUMENTS = ("transformers.training_args:TrainingArguments.__post_init__",)
_DOCS = "https://huggingface.co/docs/transformers/main/en/main_classes/trainer"

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
OWN = replace(
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
TRAINER = replace(
    BASE,
    name="hf-trainer",
    title="the Trainer's gradient_checkpointing",
    keep=60,
    remove="set gradient_checkpointing=False in TrainingArguments",
    renames=(Rename("transformers", "5.23", "gradient_checkpointing", "activation_checkpointing"),),
    docs=_DOCS,
    switched_by=_TRAINER,
    settings=_ARGUMENTS,
    edits=(
        Edit("*", "keyword", "gradient_checkpointing"),
        Edit("*", "keyword", "activation_checkpointing"),
    ),
)
SHARDED = replace(
    pytorch.WRAPPER,
    name="hf-trainer-fsdp",
    title="the Trainer's fsdp_config activation_checkpointing",
    keep=70,
    keep_sharded=110,
    remove='set "activation_checkpointing": false in the Trainer\'s fsdp_config',
    docs=_DOCS,
    checked="read (transformers 5.23.0, accelerate 1.15.0); the plugin that it sets up ran here",
    variants=("transformers >= 4.33: non-reentrant",),
    caution="Look whether anything else reads the same fsdp_config.",
    switched_by=_TRAINER,
    settings=_ARGUMENTS,
    edits=(Edit("*", "entry", "activation_checkpointing"),),
)
# The last is asked by all of them.
MECHANISMS = (SHARDED, TRAINER, OWN)


def signatures() -> tuple[Signature, ...]:
    """Failures that are its own."""
    return (
        Signature(
            code="RS119",
            name="both-checkpoint-switches",
            cause_name="trainer",
            error="ValueError",
            message=re.compile(
                r"activation_checkpointing.{0,400}?can't (?:both )?be set to True", re.DOTALL
            ),
            title="Both switches for activation checkpointing are on, and the Trainer refuses them",
            cause=(
                "FSDP's activation_checkpointing and the training argument would each checkpoint "
                "every layer."
            ),
            fix=(
                "Keep fsdp_config's activation_checkpointing and set the training argument "
                "(gradient_checkpointing, from 5.23 activation_checkpointing) to False."
            ),
            keep="fsdp_config['activation_checkpointing']",
            remove="the training argument",
            versions="transformers 4.33 and later.",
            sources=("https://github.com/huggingface/transformers/pull/25771",),
            checked="message",
        ),
        Signature(
            code="RS125",
            name="second-checkpoint-warned",
            cause_name="all-gather",
            message=re.compile(
                r"redundant AllGather (?:operation )?in (?:the )?backward pass", re.IGNORECASE
            ),
            notice=True,
            severity="warning",
            title="transformers warns that its checkpointing gathers FSDP's parameters once more",
            cause=(
                "The model's checkpointing is on under FSDP. Outside the FSDP units, every "
                "recompute gathers parameters again."
            ),
            fix=(
                "Set fsdp_config's activation_checkpointing instead, and the training argument to "
                "False."
            ),
            versions="The warning: transformers 4.43 and later.",
            sources=("https://github.com/huggingface/transformers/issues/30404",),
        ),
    )
