"""Libraries for parallel training, each with its checkpoint function.

- Megatron-core: ``checkpoint`` in ``megatron/core/tensor_parallel/random.py`` for granularity
  ``full``, and ``CheckpointWithoutOutput``, recomputed by a gradient hook, for parts of
  ``selective``. With FP8 it calls Transformer Engine's instead.
- DeepSpeed: ``deepspeed/runtime/activation_checkpointing/checkpointing.py``. The section
  ``activation_checkpointing`` of its JSON only says how; something must call the function.
- Transformer Engine: ``transformer_engine/pytorch/distributed.py``.
- fairscale: ``fairscale/nn/checkpoint/checkpoint_activations.py`` puts a partial of
  ``_checkpointed_forward`` in the place of the module's ``forward``; class and name stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from recompute_scan.frameworks import detect
from recompute_scan.frameworks.base import (
    NON_REENTRANT,
    REENTRANT,
    Edit,
    Flaw,
    Mechanism,
    Setting,
    SettingSwitch,
    Values,
    truthy,
)
from recompute_scan.frameworks.detect import Signature, innermost, some

# A gradient hook starts its recompute (``discard_output_and_register_recompute``).
_SELECTIVE = "CheckpointWithoutOutputFunction"
_DEEPSPEED = "deepspeed/runtime/activation_checkpointing/checkpointing"

MEGATRON = Mechanism(
    name="megatron-recompute",
    title="Megatron-core's recompute_granularity",
    keep=80,
    why_keep="it knows the parallel layout and keeps the random states of all ranks",
    remove="leave --recompute-granularity out, or choose selective with fewer --recompute-modules",
    docs="https://docs.nvidia.com/megatron-core/developer-guide/latest/index.html",
    checked="ran here (megatron-core 0.16.1: its functions; their callers were read)",
    variants=("0.16: its own, reentrant",),
    caution="The setting applies to all ranks and pipeline stages; memory must suffice on each.",
    functions=(_SELECTIVE,),
    holding=("megatron/core/tensor_parallel/random.py:checkpoint",),
    asks=("megatron/core/tensor_parallel/random.py:*",),
    backward=r"(?:tensor_parallel/random|transformer_engine/pytorch/distributed)\.py:backward$",
    watched=("megatron.core.tensor_parallel.random:CheckpointFunction",),
)
DEEPSPEED = Mechanism(
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
    caution="Check whether memory depends on its partitioned or offloaded activations.",
    packages=("deepspeed",),
    holding=(f"{_DEEPSPEED}.py:checkpoint", f"{_DEEPSPEED}.py:non_reentrant_checkpoint"),
    asks=(f"{_DEEPSPEED}.py:*",),
    watched=tuple(
        f"{_DEEPSPEED.replace('/', '.')}:{name}"
        for name in ("CheckpointFunction", "non_reentrant_checkpoint")
    ),
    launchers=("deepspeed.launcher",),
    commands=("deepspeed",),
    calls=("deepspeed.checkpointing", "activation_checkpointing.checkpointing"),
    engines=(("DeepSpeedEngine", "DeepSpeed"),),
    sharding=r"deepspeed|/zero/",
    gathering=r"deepspeed/runtime/",
    stepping=r"deepspeed/runtime/\S{0,300}:_?optimizer_step$",
)
TRANSFORMER_ENGINE = Mechanism(
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
FAIRSCALE = Mechanism(
    name="fairscale-wrapper",
    title="fairscale's checkpoint_wrapper",
    keep=35,
    why_keep="the code itself chose what to checkpoint",
    remove="delete fairscale's checkpoint_wrapper(…) call",
    docs="https://fairscale.readthedocs.io/en/stable/api/nn/checkpoint/checkpoint_activations.html",
    checked="ran here (fairscale 0.4.13)",
    variants=("0.4: its own, reentrant",),
    caution="It also patches batch normalization, so that recomputes leave its statistics alone.",
    holding=("fairscale/nn/checkpoint/checkpoint_activations.py:_checkpointed_forward",),
    asks=("fairscale/nn/checkpoint/checkpoint_activations.py:*",),
    watched=("fairscale.nn.checkpoint.checkpoint_activations:CheckpointFunction",),
    sharding="fairscale",
    gathering="fairscale/",
    switches=("fairscale.nn.checkpoint.checkpoint_activations:checkpoint_wrapper",),
    edits=(Edit("checkpoint_wrapper", "unwrap"),),
)
MECHANISMS = (MEGATRON, DEEPSPEED, TRANSFORMER_ENGINE, FAIRSCALE)

# Keys that only a configuration of DeepSpeed has.
DEEPSPEED_ROOTS = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}


def flaws(values: Values) -> Iterator[Flaw]:
    """The section of its configuration, where no script calls what the section is for."""
    asked = [
        (path, setting)
        for path, setting in values.items()
        if path[:1] == ("activation_checkpointing",) and setting.value is True
    ]
    known = DEEPSPEED_ROOTS & {path[0] for path in values if path}
    if known and any(len(path) > 1 for path, _ in asked):
        yield Flaw(
            asked[0][1].line,
            "RS606",
            "activation_checkpointing switches nothing on alone",
            "DeepSpeed reads this section when a model calls deepspeed.checkpointing; no script "
            "among these does.",
            "Delete the section, or switch checkpointing on in the model.",
            unless=DEEPSPEED.calls,
        )


def switched_on(path: tuple[str, ...], setting: Setting) -> Iterator[SettingSwitch]:
    """The request of ``--recompute-granularity``, in a command or in a file of arguments."""
    name = path[-1].lstrip("-").replace("-", "_") if path else ""
    if name == "recompute_granularity" and setting.value in ("full", "selective"):
        which = "whole layers" if setting.value == "full" else "parts of each layer"
        yield SettingSwitch("Megatron-core", which, "reentrant")
    elif name == "recompute_activations" and truthy(setting.value):
        yield SettingSwitch("Megatron-core", "parts of each layer", "reentrant")


def signatures() -> tuple[Signature, ...]:
    """Failures of these libraries alone."""
    return (*_of_settings(), *_of_functions(), *_of_zero(), *_of_fp8())


def _of_settings() -> tuple[Signature, ...]:
    """Settings that do not fit together; Megatron's messages are from 0.16.1."""
    return (
        Signature(
            code="RS131",
            cause_name="settings",
            error="ValueError|AssertionError",
            message=re.compile(
                r"^Invalid activation recompute method\.|^Invalid choices for recompute_modules: "
                r"|^(?:When u|U)sing recompute_gran\w+: |^recompute_method: .{1,40} must be "
                r"|^recompute_num_layers must be |^recompute layer id must be between "
                r"|^(?:moe_act|mla_up_proj) in recompute_modules is only supported "
                r"|^shared_experts recompute cannot work |^CPU offloading does not work when "
                r"activation recomputation|^Do not set --moe-layer-recompute with full"
                r"|^Delayed scaling does not support moe_act and layernorm recompute"
                r"|^distribute_saved_activations: .{1,40} must be false"
            ),
            title="Megatron refuses this combination of recompute settings",
            cause="Full recompute needs a method and a number of layers; selective takes modules.",
            fix="""Set --recompute-granularity full with --recompute-method and
                --recompute-num-layers, or selective with --recompute-modules. With Primus before
                pull request 965, use recompute_layer_ids or multi-token prediction, not both.""",
            versions="Megatron-core, all versions; the names of modules change between them.",
            sources=(
                "AMD-AGI/Primus/pull/965",
                "https://docs.nvidia.com/megatron-core/developer-guide/latest/index.html",
            ),
        ),
        Signature(
            code="RS131",
            cause_name="buffers",
            error="IndexError",
            message=re.compile(r"^list index out of range"),
            where=innermost(r"activation_checkpointing/checkpointing\.py:partition_activations$"),
            title="DeepSpeed's contiguous buffers have no room for this checkpoint",
            cause="""With contiguous_memory_optimization, DeepSpeed allocates buffers for a given
                number of checkpoints. The number is missing (Lightning passes none) or too small,
                or forward passes without backward filled them.""",
            fix="""Set number_checkpoints in activation_checkpointing (num_checkpoints in
                deepspeed.checkpointing.configure) to the checkpoints of one forward pass, or
                contiguous_memory_optimization to false. In evaluation call
                deepspeed.checkpointing.reset() after each forward.""",
            versions="DeepSpeed; from pull request 8041 (June 2026) on, the error names a missing "
            "number.",
            sources=(
                "Lightning-AI/pytorch-lightning/issues/20329",
                "deepspeedai/DeepSpeed/pull/3005",
                "deepspeedai/DeepSpeed/pull/8041",
            ),
        ),
    )


def _of_functions() -> tuple[Signature, ...]:
    """Failures of Megatron's and DeepSpeed's own checkpoint functions."""
    return (
        Signature(
            code="RS131",
            cause_name="random-states",
            message=re.compile(r"^cuda rng state \S{1,80} is not added"),
            title="The model asks for a random state that nothing has set up",
            cause="""Megatron and DeepSpeed keep named random states, for dropout under tensor
                parallelism and checkpoints. model_parallel_cuda_manual_seed() adds them, and was
                not called, or was called in the other library.""",
            fix="""Before the first forward pass, call model_parallel_cuda_manual_seed(seed) of the
                library that the traceback ends in: deepspeed.checkpointing, or Megatron's
                tensor_parallel.""",
            sources=(
                "deepspeedai/DeepSpeed/issues/3583",
                "deepspeedai/DeepSpeedExamples/issues/549",
            ),
        ),
    )


def _of_zero() -> tuple[Signature, ...]:
    """Failures of DeepSpeed's ZeRO."""
    return (
        Signature(
            code="RS101",
            cause_name="zero3-frozen",
            error="CheckpointError",
            message=detect.MISMATCH,
            fits=detect.came_back_empty,
            title="Frozen parameters were partitioned again before their layer was recomputed "
            "(ZeRO-3)",
            cause="""DeepSpeed ZeRO-3 does that when the layer's forward ends. The recompute saves
                the empty placeholder of shape [0]. LoRA on ZeRO-3 is the usual case.""",
            fix="""Upgrade DeepSpeed. With an older one, use ZeRO-2, or pass
                `gradient_checkpointing_kwargs={'use_reentrant': True}` with `use_cache=False` and
                `enable_input_require_grads()`: the tensors are right and only the placeholder
                differs.""",
            gradients=REENTRANT,
            versions="DeepSpeed before 0.19.3 (pull request 8148).",
            sources=(
                "huggingface/transformers/issues/47254",
                "deepspeedai/DeepSpeed/pull/8148",
                "huggingface/trl/issues/2514",
            ),
        ),
        Signature(
            code="RS126",
            cause_name="reduced-twice",
            error="AssertionError",
            message=re.compile(
                r"[Pp]arameter \S+ has already been reduced\.\s+Gradient computed twice"
                r"|^Gradient computed twice for this partition"
            ),
            title="ZeRO saw the gradient of one parameter twice in one backward pass",
            cause="""ZeRO reduces a gradient once. A reentrant checkpoint around a module that
                runs twice, or two backward passes through one graph, produce it twice. The message
                does not say which.""",
            fix="""With checkpoints, use the non-reentrant variant (use_reentrant=False). Run one
                forward and one backward pass per step: add the losses up, or, without BatchNorm and
                with a per-sample loss, join the batches.""",
            gradients=NON_REENTRANT,
            versions="DeepSpeed, ZeRO stages 1 and 2.",
            sources=("modelscope/ms-swift/issues/3128", "xfactlab/orpo/issues/9"),
        ),
    )


def _of_fp8() -> tuple[Signature, ...]:
    """Failures of FP8 under Transformer Engine and Megatron."""
    return (
        Signature(
            code="RS121",
            cause_name="fp8",
            error="AssertionError",
            message=re.compile(r"if early stop is enabled, we don't expect to reach here"),
            title="The recompute ended without saving what the original run saved (early stop)",
            cause="""The recompute saved fewer tensors than the first run, as Transformer Engine's
                fp8 layers do under torch's checkpoint.""",
            fix="""Checkpoint these layers with transformer_engine.pytorch.checkpoint (in
                composer, te_checkpoint_wrapper).""",
            versions="torch 2.0, as reported; since 2.13 it is RS102.",
            sources=("NVIDIA/TransformerEngine/issues/415",),
        ),
        Signature(
            code="RS133",
            cause_name="inner-autocast",
            error="KeyError",
            message=re.compile(r"^'global_fp8_buffer_pos_fwd_recompute'$"),
            title="The recompute looks for an FP8 state that the forward pass did not keep",
            cause="""te.checkpoint checks for FP8 on entry, but the function inside switches it on.
                The forward keeps no scaling state, and the recompute asks for it. Only delayed
                scaling keeps such state.""",
            fix="""Enter the FP8 autocast around te.checkpoint, or use Transformer Engine with pull
                request 3284 or a recipe other than delayed scaling.""",
            versions="Transformer Engine before pull request 3284 (July 2026); delayed scaling.",
            sources=("NVIDIA/TransformerEngine/pull/3284",),
        ),
        Signature(
            code="RS133",
            cause_name="main-grad",
            error="AttributeError",
            message=re.compile(r"^'Tensor' object has no attribute 'main_grad'"),
            where=some(r"tensor_parallel/random\.py:(?:backward|_recompute)$"),
            title="Megatron's recompute runs outside the FP8 autocast of the forward pass",
            cause="""tensor_parallel.checkpoint does not switch FP8 on in the recompute.
                Transformer Engine then unpacks the FP8 weight into a tensor without main_grad.
                With BF16 weights the recompute runs in another precision, without an error.""",
            fix="""Remove `core_attn` and `gdn` from `--recompute-modules` (fused attention needs
                no recompute), or use granularity full. Megatron's pull request 7538 switches FP8
                on in the recompute.""",
            versions="Megatron-core with FP8 and selective recompute, as of September 2026.",
            sources=("NVIDIA/Megatron-LM/pull/7538",),
        ),
    )
