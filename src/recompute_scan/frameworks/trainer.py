"""Hugging Face's ``Trainer``: its own argument, and the one for FSDP's wrapper.

``transformers/trainer.py`` enables the model's checkpointing when training begins. Since 4.33 it
refuses both arguments together, and sees nothing that the script switched on itself.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from recompute_scan.frameworks import fsdp, huggingface
from recompute_scan.frameworks.mechanism import Edit, Rename
from recompute_scan.frameworks.signature import Signature

_TRAINER = ("transformers/trainer.py:*",)
_ARGUMENTS = ("transformers.training_args:TrainingArguments.__post_init__",)
_DOCS = "https://huggingface.co/docs/transformers/main/en/main_classes/trainer"

MECHANISM = replace(
    huggingface.BASE,
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
    fsdp.BASE,
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
MECHANISMS = (SHARDED, MECHANISM)

SIGNATURES = (
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
            "The model's own checkpointing is on under FSDP; where it is outside the FSDP "
            "units, every recompute gathers the parameters again."
        ),
        fix=(
            "Set fsdp_config's activation_checkpointing instead, and the training argument to "
            "False."
        ),
        versions="The warning: transformers 4.43 and later.",
        sources=("https://github.com/huggingface/transformers/issues/30404",),
    ),
)
