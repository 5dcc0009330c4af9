"""LLaMA-Factory's own way into a Hugging Face model's checkpointing, on by default.

``llamafactory/model/model_utils/checkpointing.py`` replaces the model's enable method, so the
``Trainer`` does not see it and accelerate's FSDP setting comes on top.
"""

from __future__ import annotations

from msgspec.structs import replace

from recompute_scan.frameworks import huggingface

MECHANISM = replace(
    huggingface.BASE,
    name="llama-factory",
    title="LLaMA-Factory's own switch (disable_gradient_checkpointing turns it off)",
    keep=45,
    remove="set disable_gradient_checkpointing: true in LLaMA-Factory's configuration",
    renames=(),
    docs="https://llamafactory.readthedocs.io/en/latest/",
    checked="read (llamafactory 0.9.5, which fails with transformers 5.23)",
    variants=("reentrant (use_reentrant_gc)", "FSDP2: non-reentrant, forced"),
    asks=("llamafactory/model/model_utils/checkpointing.py:*",),
    functions=("UnslothGradientCheckpointing",),
    commands=("llamafactory-cli",),
    switches=(),
    edits=(),
)
