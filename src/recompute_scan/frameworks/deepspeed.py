"""DeepSpeed's own checkpoint function.

``deepspeed/runtime/activation_checkpointing/checkpointing.py``. The section
``activation_checkpointing`` of its JSON only says how; something must call the function.
"""

from __future__ import annotations

from recompute_scan.frameworks.mechanism import Mechanism

MECHANISM = Mechanism(
    name="deepspeed-checkpoint",
    title="deepspeed.checkpointing.checkpoint",
    keep=45,
    why_keep="it can partition and offload what it saves",
    remove=(
        "call the layer itself instead of deepspeed.checkpointing.checkpoint(…); in a "
        "PipelineModule set activation_checkpoint_interval=0"
    ),
    docs="https://deepspeed.readthedocs.io/en/latest/activation-checkpointing.html",
    checked="ran here (deepspeed 0.19.8: both functions; its pipeline was read)",
    variants=(
        "checkpoint(): reentrant",
        "pipeline with use_reentrant false: its own non-reentrant function",
    ),
    caution="Look whether memory depends on its partitioned or offloaded activations.",
    packages=("deepspeed",),
    holding=(
        "deepspeed/runtime/activation_checkpointing/checkpointing.py:checkpoint",
        "deepspeed/runtime/activation_checkpointing/checkpointing.py:non_reentrant_checkpoint",
    ),
    asks=("deepspeed/runtime/activation_checkpointing/checkpointing.py:*",),
    watched=(
        "deepspeed.runtime.activation_checkpointing.checkpointing:CheckpointFunction",
        "deepspeed.runtime.activation_checkpointing.checkpointing:non_reentrant_checkpoint",
    ),
    launchers=("deepspeed.launcher",),
    engines=(("DeepSpeedEngine", "DeepSpeed"),),
)
