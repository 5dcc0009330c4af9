"""NeMo Automodel; NeMo's Megatron models go by Megatron-core's settings.

``nemo_automodel/components/distributed/`` chooses the model's own checkpointing, the wrapper
around layers, or the wrapper around parts of them, and never two.
"""

from __future__ import annotations

from msgspec.structs import replace

from recompute_scan.frameworks import fsdp, huggingface

MECHANISM = replace(
    fsdp.BASE,
    name="nemo-automodel",
    title="NeMo Automodel's activation_checkpointing",
    keep=70,
    keep_sharded=110,
    remove="set distributed.activation_checkpointing: false in the recipe",
    docs="https://docs.nvidia.com/nemo/automodel/latest/index.html",
    checked="read (nemo-automodel 0.7.0)",
    variants=("0.7: non-reentrant",),
    caution="Look whether the recipe is shared with other jobs.",
    asks=(*fsdp.BASE.asks, *huggingface.BASE.asks),
    switched_by=("nemo_automodel/components/*:*",),
    edits=(),
)
