"""diffusers' ``enable_gradient_checkpointing``: ``diffusers/models/modeling_utils.py``."""

from __future__ import annotations

from recompute_scan.frameworks.base import Edit, Mechanism

MECHANISM = Mechanism(
    name="diffusers",
    title="diffusers' enable_gradient_checkpointing",
    keep=50,
    why_keep="it is the model's own, and knows its blocks",
    remove="delete the enable_gradient_checkpointing() call",
    docs="https://huggingface.co/docs/diffusers/main/en/api/models/overview",
    checked="ran here (diffusers 0.42.1)",
    variants=("0.42: non-reentrant, unless a custom function is passed",),
    asks=("diffusers/models/*:*",),
    switches=("diffusers.models.modeling_utils:ModelMixin.enable_gradient_checkpointing",),
    edits=(Edit("enable_gradient_checkpointing", "delete"),),
)
