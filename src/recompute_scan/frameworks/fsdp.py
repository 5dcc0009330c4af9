"""PyTorch's checkpoint wrapper, made for FSDP, applied by the user's own code.

``torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py``. The wrapper's state is a
module of class ``CheckpointWrapper``; a second application wraps again, nothing guards it.
"""

from __future__ import annotations

from msgspec.structs import replace

from recompute_scan.frameworks.mechanism import Edit, Mechanism

# What all share that apply it.
BASE = Mechanism(
    name="fsdp-wrapper",
    title="FSDP's checkpoint wrapper",
    keep=55,
    keep_sharded=100,
    why_keep="it is around the layer itself, whatever calls the layer",
    remove="delete the apply_activation_checkpointing(…) or checkpoint_wrapper(…) call",
    docs="https://docs.pytorch.org/docs/stable/fsdp.html",
    checked="ran here (torch 2.13.0)",
    variants=("torch < 2.2: reentrant", "torch >= 2.2: non-reentrant"),
    asks=("torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py:*",),
    edits=(Edit("apply_activation_checkpointing", "delete"), Edit("checkpoint_wrapper", "unwrap")),
)
MECHANISM = replace(
    BASE,
    fewer="let the check_fn of apply_activation_checkpointing refuse {layers}",
    selectively="pass context_fn={context} to checkpoint_wrapper",
    sharding="fsdp|fully_sharded",
    gathering=r"torch/distributed/(?:fsdp|checkpoint)/|/_shard/",
    engines=(("FullyShardedDataParallel", "FSDP"),),
)
