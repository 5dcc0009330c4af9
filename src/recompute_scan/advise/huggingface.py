"""Hugging Face transformers' own checkpointing.

``PreTrainedModel.gradient_checkpointing_enable`` (since 5.23 ``activation_checkpointing_enable``,
of which the former is an alias): reentrant by default up to 4.57, non-reentrant from 5.0.
"""

from recompute_scan.advise.mechanism import Mechanism

MECHANISM = Mechanism(
    name="hf-gradient-checkpointing",
    title="Hugging Face's own checkpointing",
    keep=50,
    why_keep="it is the model's own, and nothing else checkpoints its layers",
    remove="delete the gradient_checkpointing_enable(…) call",
    removable_call=True,
    caution=(
        "Also keep use_cache=False: the removed switch turned the KV cache off, and a replay "
        "fails on a cache that grew."
    ),
    docs="https://huggingface.co/docs/transformers/main/en/fsdp",
)
