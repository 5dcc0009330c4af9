"""Transformer Engine's checkpoint function: ``transformer_engine/pytorch/distributed.py``."""

from __future__ import annotations

import re

from recompute_scan.frameworks.mechanism import Mechanism
from recompute_scan.frameworks.signature import Signature

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


def signatures() -> tuple[Signature, ...]:
    """Failures that are its own."""
    return (
        Signature(
            code="RS121",
            name="early-stop-assertion",
            cause_name="fp8",
            error="AssertionError",
            message=re.compile(r"if early stop is enabled, we don't expect to reach here"),
            title="The recompute ended without saving what the original run saved (early stop)",
            cause=(
                "The recompute saved fewer tensors than the first run. Transformer Engine's fp8 "
                "layers under torch's own checkpoint do so."
            ),
            fix=(
                "Checkpoint Transformer Engine's layers with transformer_engine.pytorch.checkpoint "
                "(composer: te_checkpoint_wrapper: true)."
            ),
            versions="torch 2.0, as reported; torch 2.13 raises RS102 instead.",
            sources=("https://github.com/NVIDIA/TransformerEngine/issues/415",),
        ),
    )
