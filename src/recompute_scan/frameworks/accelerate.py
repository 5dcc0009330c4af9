"""Accelerate's FSDP plugin, for FSDP1 and FSDP2.

FSDP1: ``accelerate/accelerator.py`` applies the wrapper after sharding, by the auto-wrap policy.
FSDP2: ``fsdp2_apply_ac`` in ``accelerate/utils/fsdp_utils.py``, before ``fully_shard``. Neither
looks at what the model has switched on itself.
"""

from __future__ import annotations

from msgspec.structs import replace

from recompute_scan.frameworks import pytorch
from recompute_scan.frameworks.mechanism import Edit

MECHANISM = replace(
    pytorch.WRAPPER,
    name="accelerate-fsdp",
    title="accelerate's fsdp_activation_checkpointing",
    keep=70,
    keep_sharded=110,
    remove=(
        "set fsdp_activation_checkpointing: false in accelerate's configuration, or "
        "activation_checkpointing=False in FullyShardedDataParallelPlugin"
    ),
    docs="https://huggingface.co/docs/accelerate/usage_guides/fsdp",
    packages=("accelerate",),
    checked="ran here (accelerate 1.15.0, FSDP1 and FSDP2)",
    variants=(
        "FSDP1: non-reentrant",
        "FSDP2: torch's default, non-reentrant (fsdp2_apply_ac: in 1.10.1, not in 1.7.0)",
    ),
    caution="Look whether the configuration is shared with other jobs.",
    switched_by=("accelerate/accelerator.py:*", "accelerate/utils/fsdp_utils.py:*"),
    settings=("accelerate.utils.dataclasses:FullyShardedDataParallelPlugin.__post_init__",),
    variables=("FSDP_ACTIVATION_CHECKPOINTING",),
    commands=("accelerate launch", "accelerate.commands.launch"),
    launchers=("accelerate.commands",),
    edits=(Edit("*", "keyword", "activation_checkpointing"),),
)
