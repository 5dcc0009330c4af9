"""Transformer Engine's checkpoint function: ``transformer_engine/pytorch/distributed.py``."""

from __future__ import annotations

import re

from recompute_scan.frameworks.base import Mechanism
from recompute_scan.frameworks.detect import Signature, some

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
                "The recompute saved fewer tensors than the first run, as Transformer Engine's fp8 "
                "layers do under torch's checkpoint."
            ),
            fix=(
                "Checkpoint these layers with transformer_engine.pytorch.checkpoint (composer: "
                "te_checkpoint_wrapper: true)."
            ),
            versions="torch 2.0, as reported; torch 2.13 raises RS102 instead.",
            sources=("https://github.com/NVIDIA/TransformerEngine/issues/415",),
        ),
        Signature(
            code="RS133",
            name="fp8-state-lost",
            cause_name="inner-autocast",
            error="KeyError",
            message=re.compile(r"^'global_fp8_buffer_pos_fwd_recompute'$"),
            title="The recompute looks for an FP8 state that the forward pass did not keep",
            cause=(
                "te.checkpoint checks for FP8 on entry, but the function inside switches it on. "
                "The forward keeps no scaling state, and the recompute asks for it. Only delayed "
                "scaling keeps such state."
            ),
            fix=(
                "Enter the FP8 autocast around te.checkpoint, or use Transformer Engine with pull "
                "request 3284 or another recipe than delayed scaling."
            ),
            versions="Transformer Engine before pull request 3284 (July 2026); delayed scaling.",
            sources=("https://github.com/NVIDIA/TransformerEngine/pull/3284",),
        ),
        Signature(
            code="RS133",
            name="fp8-state-lost",
            cause_name="main-grad",
            error="AttributeError",
            message=re.compile(r"^'Tensor' object has no attribute 'main_grad'"),
            where=some(r"tensor_parallel/random\.py:(?:backward|_recompute)$"),
            needs_frames=True,
            title="Megatron's recompute runs outside the FP8 autocast of the forward pass",
            cause=(
                "tensor_parallel.checkpoint does not switch FP8 on in the recompute. Transformer "
                "Engine then unpacks the FP8 weight into a tensor without main_grad. With BF16 "
                "weights the recompute runs in another precision, without an error."
            ),
            fix=(
                "Remove core_attn and gdn from --recompute-modules (fused attention needs no "
                "recompute), or use granularity full. Megatron's pull request 7538 switches FP8 "
                "on."
            ),
            versions="Megatron-core with FP8 and selective recompute, as of September 2026.",
            sources=("https://github.com/NVIDIA/Megatron-LM/pull/7538",),
        ),
    )
