"""Transformer Engine's checkpoint function: ``transformer_engine/pytorch/distributed.py``."""

from __future__ import annotations

from recompute_scan.frameworks.mechanism import Mechanism

MECHANISM = Mechanism(
    name="transformer-engine",
    title="Transformer Engine's te.checkpoint",
    keep=85,
    why_keep="it keeps the FP8 state of its layers right, which torch's function does not",
    remove="call the layer itself instead of te.checkpoint(…)",
    docs="https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html",
    checked="read (source at commit 591cb1d)",
    variants=("use_reentrant=True by default; its non-reentrant way has no early stop",),
    caution="Under FP8 torch's own checkpoint cannot take its place.",
    packages=("transformer-engine",),
    functions=("_CheckpointFunction",),
    holding=("transformer_engine/pytorch/distributed.py:checkpoint",),
    asks=("transformer_engine/pytorch/distributed.py:*",),
    watched=("transformer_engine.pytorch.distributed:_CheckpointFunction",),
)
