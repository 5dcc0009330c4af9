"""Hugging Face's ``Trainer``: its own argument, and the one for FSDP's wrapper.

``transformers/trainer.py`` enables the model's checkpointing when training begins. Since 4.33 it
refuses both arguments together, and sees nothing that the script switched on itself.
"""

from __future__ import annotations

from msgspec.structs import replace

from recompute_scan.frameworks import fsdp, huggingface
from recompute_scan.frameworks.mechanism import Edit, Rename

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
