"""Composer's and LLM Foundry's ``fsdp_config``.

FSDP1: ``composer/distributed/dist_strategy.py``. FSDP2: ``apply_ac`` in
``composer/distributed/activation_checkpointing.py``.
"""

from __future__ import annotations

from msgspec.structs import replace

from recompute_scan.frameworks import pytorch

MECHANISM = replace(
    pytorch.WRAPPER,
    name="composer-fsdp",
    title="Composer's fsdp_config activation_checkpointing",
    keep=70,
    keep_sharded=105,
    remove="set activation_checkpointing: false in fsdp_config",
    docs="https://docs.mosaicml.com/projects/composer/en/stable/notes/distributed_training.html",
    checked="read (mosaicml 0.32.1)",
    variants=(
        "FSDP1: reentrant unless activation_checkpointing_reentrant is false",
        "FSDP2: non-reentrant",
    ),
    caution="Look whether the configuration is shared with other jobs.",
    switched_by=("composer/distributed/*:*",),
    edits=(),
)
