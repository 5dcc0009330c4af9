"""DeepSpeed's own checkpoint function.

``deepspeed/runtime/activation_checkpointing/checkpointing.py``. The section
``activation_checkpointing`` of its JSON only says how; something must call the function.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from recompute_scan.frameworks.base import NON_REENTRANT, REENTRANT, Flaw, Mechanism, Values
from recompute_scan.frameworks.detect import Signature, innermost

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
    commands=("deepspeed",),
    calls=("deepspeed.checkpointing", "activation_checkpointing.checkpointing"),
    engines=(("DeepSpeedEngine", "DeepSpeed"),),
    backward=r"/checkpointing\.py:backward$",
    sharding=r"deepspeed|/zero/",
    gathering=r"deepspeed/runtime/",
    stepping=r"deepspeed/runtime/\S{0,300}:_?optimizer_step$",
)

# What only a configuration of its has.
ROOTS = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}


def flaws(values: Values) -> Iterator[Flaw]:
    """The section of its configuration, where no script calls what the section is for."""
    asked = [
        (path, setting)
        for path, setting in values.items()
        if path[:1] == ("activation_checkpointing",) and setting.value is True
    ]
    known = ROOTS & {path[0] for path in values if path}
    if known and any(len(path) > 1 for path, _ in asked):
        yield Flaw(
            asked[0][1].line,
            "RS606",
            "activation_checkpointing switches nothing on alone",
            "DeepSpeed reads this section when a model calls deepspeed.checkpointing; no script "
            "among these does.",
            "Delete the section, or switch checkpointing on in the model.",
            unless=MECHANISM.calls,
        )


def signatures() -> tuple[Signature, ...]:
    """Failures that are its own."""
    from recompute_scan.frameworks import detect  # noqa: PLC0415 - for failures alone

    return (
        Signature(
            code="RS101",
            name="checkpoint-metadata-mismatch",
            cause_name="zero3-frozen",
            error="CheckpointError",
            message=detect.MISMATCH,
            fits=detect.came_back_empty,
            title="Frozen parameters were given back before their layer was recomputed (ZeRO-3)",
            cause=(
                "DeepSpeed ZeRO-3 partitions a frozen parameter again when its layer's forward "
                "ends. The recompute saves the empty placeholder of shape [0]. LoRA on ZeRO-3 is "
                "the usual case."
            ),
            fix=(
                "Upgrade DeepSpeed. Before the fix, pass "
                "`gradient_checkpointing_kwargs={'use_reentrant': True}` with `use_cache=False` "
                "and `enable_input_require_grads()`, or use ZeRO-2: here the tensors are right and "
                "only the placeholder differs."
            ),
            gradients=REENTRANT,
            versions="DeepSpeed before 0.19.3 (pull request 8148).",
            sources=(
                "https://github.com/huggingface/transformers/issues/47254",
                "https://github.com/deepspeedai/DeepSpeed/pull/8148",
                "https://github.com/huggingface/trl/issues/2514",
            ),
        ),
        Signature(
            code="RS131",
            name="checkpointing-not-switched-on",
            cause_name="buffers",
            error="IndexError",
            message=re.compile(r"^list index out of range"),
            where=innermost(r"activation_checkpointing/checkpointing\.py:partition_activations$"),
            needs_frames=True,
            title="DeepSpeed's contiguous buffers have no room for this checkpoint",
            cause=(
                "With contiguous_memory_optimization, DeepSpeed allocates buffers for a given "
                "number of checkpoints. The number is missing (Lightning passes none) or too "
                "small, or forward passes without backward filled them."
            ),
            fix=(
                "Set number_checkpoints in activation_checkpointing (num_checkpoints in "
                "deepspeed.checkpointing.configure) to the checkpoints of one forward pass, or "
                "contiguous_memory_optimization to false. In evaluation call "
                "deepspeed.checkpointing.reset() after each forward."
            ),
            versions="DeepSpeed; from pull request 8041 (June 2026) on, a missing number is named.",
            sources=(
                "https://github.com/Lightning-AI/pytorch-lightning/issues/20329",
                "https://github.com/deepspeedai/DeepSpeed/pull/3005",
                "https://github.com/deepspeedai/DeepSpeed/pull/8041",
            ),
        ),
        Signature(
            code="RS126",
            name="zero-reduced-twice",
            cause_name="reduced-twice",
            error="AssertionError",
            message=re.compile(
                r"[Pp]arameter \S+ has already been reduced\.\s+Gradient computed twice"
                r"|^Gradient computed twice for this partition"
            ),
            title="ZeRO saw the gradient of one parameter twice in one backward pass",
            cause=(
                "ZeRO reduces a gradient once. A reentrant checkpoint around a module that runs "
                "twice, or two backward passes through one graph, give it twice. The message does "
                "not say which."
            ),
            fix=(
                "With checkpoints, use the non-reentrant variant (use_reentrant=False). Run one "
                "forward and one backward pass per step: add the losses up, or join the batches if "
                "neither BatchNorm nor the loss looks across a batch."
            ),
            gradients=NON_REENTRANT,
            versions="DeepSpeed, ZeRO stages 1 and 2.",
            sources=(
                "https://github.com/modelscope/ms-swift/issues/3128",
                "https://github.com/xfactlab/orpo/issues/9",
            ),
        ),
    )
