"""Meanings of operator and range names, one table each, with the sources of the names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from recompute_scan.frameworks.pytorch import CHECKPOINT_FILE
from recompute_scan.frameworks.registry import MECHANISMS

# torch/csrc/autograd/engine.cpp and function.h: the engine's range around each node.
ENGINE = "autograd::engine::evaluate_function: "

# Traces of torch 1.8 to 1.10 have the nodes themselves only.
BARE_NODE = re.compile(r"[A-Z_]\w*Backward\d*$")

# Checkpoint functions: their forward holds the block and their backward runs it again. With the
# mechanism that the name alone gives. Each is a torch.autograd.Function, so the profiler names
# its node after it. Torch's name is also DeepSpeed's, Megatron-core's, fairscale's, and others'.
TORCHS_FUNCTION = "CheckpointFunction"
CHECKPOINT_FUNCTIONS = {
    TORCHS_FUNCTION: None,
    **{name: mechanism.name for mechanism in MECHANISMS for name in mechanism.functions},
}


def nodes_of(functions: Iterable[str]) -> frozenset[str]:
    """Names of the nodes of these autograd functions (``torch/autograd/function.py``)."""
    return frozenset(f"{name}Backward" for name in functions)


def function_of(name: str) -> str:
    """Name of the autograd function, by the name of its node or of the engine range around it."""
    return name.removeprefix(ENGINE).removesuffix("Backward")


CHECKPOINT_NODES = nodes_of(CHECKPOINT_FUNCTIONS)

# Python frames, `path:function`, that hold the first run of a checkpointed function; for the
# composable checkpoint, the hook before it.
COMPOSABLE_HOOK = "torch/distributed/_composable/checkpoint_activation.py:forward_pre_hook"
CHECKPOINT_FRAMES = frozenset(
    {
        f"{CHECKPOINT_FILE}:checkpoint",
        COMPOSABLE_HOOK,
        *(place for mechanism in MECHANISMS for place in mechanism.holding),
    }
)
# Frames of torch that ask for a checkpoint on somebody's behalf.
ASKING_FRAMES = frozenset(
    {
        "torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py:forward",
        f"{CHECKPOINT_FILE}:checkpoint_sequential",
    }
)

# Adds a gradient to its parameter, and then runs the parameter's hooks. It saves no tensor.
ACCUMULATE_GRAD = f"{ENGINE}torch::autograd::AccumulateGrad"

# Around each operator that a TorchDispatchMode handles, since torch 2.13.
DISPATCH_MODE = "PythonDispatchMode"

# Optimizer, gradient clipping by the optimizer, and zeroing: never part of a forward pass.
OPTIMIZER = re.compile(r"Optimizer\.(step|zero_grad)#")

# Gathering, scattering and resharding parameters and gradients. FSDP's forward and its backward
# do the same gathers, so they would look like recomputed work.
PLUMBING = re.compile(
    r"c10d::|_c10d_functional::|record_param_comms|nccl:|gloo:|mpi:|ucc:"
    r"|FSDP::|FullyShardedDataParallel\._(pre|post|root_pre)_"
    r"|torch\.distributed\.|DistributedDataParallel\.(pre|post)"
)

COLLECTIVE = re.compile(r"c10d::|_c10d_functional::|record_param_comms")
NO_COLLECTIVE = re.compile(r".*::(wait_tensor|_wrap_tensor_autograd|barrier|monitored_barrier_)$")
GATHER = re.compile(r".*::_?all_?gather")

# Calls that c10d hands to a backend, which names both sides; and the ranges in which the backends
# record them again, NCCL around its launches, gloo on another thread.
DISPATCHED = re.compile(r"c10d::|_c10d_functional::")
GLOO = re.compile(r"gloo:")
RECORD = re.compile(r"record_param_comms$")
BACKEND = re.compile(r"(nccl|gloo|mpi|ucc|xccl|hccl):")
SHOWS_SIZES = re.compile(f"{COLLECTIVE.pattern}|{BACKEND.pattern}")

# Kernels of NCCL (``ncclKernel_``, ``ncclDevKernel_``), of RCCL, which has the same names, and of
# torch's symmetric memory.
TALKS = re.compile(
    r"(void )?(c10d::)?(nccl|rccl|oneccl|multimem_|one_shot_all_|two_shot_all_|mscclpp)", re.I
)

# Ranges of FSDP1 and FSDP2 (torch/distributed/fsdp).
SHARDING = re.compile(r"FullyShardedDataParallel\.|FSDP::")

# Operators that reduce many numbers to one, as the last of a forward pass do.
REDUCES = re.compile(
    r"aten::(mean|sum|nansum|nanmean|prod|dot|vdot|logsumexp|norm|linalg_\w*norm|amax|amin|max|min"
    r"|\w*loss\w*|cross_entropy\w*|binary_cross_entropy\w*|kl_div|cosine_embedding_loss)$"
)

# Bookkeeping that costs nothing and that a checkpoint itself adds or leaves out.
NEUTRAL = re.compile(
    r"(aten::)?(detach|detach_|alias|requires_grad_|set_|lift_fresh)$|_NoopSaveInputs$"
    r"|TorchDynamo Cache Lookup$"
)

# By it a non-reentrant checkpoint that is recomputed keeps what operators save.
DETACH = "aten::detach"

# Compiled code number `frame/version`. A reentrant checkpoint runs its block without gradients
# first and with them in the recompute: two versions of one frame.
COMPILED_REGION = re.compile(r"(Torch-Compiled Region: \d+)/\d+$")

# A compiled graph's forward, by dynamo's range or by its autograd function.
COMPILED_CALL = re.compile(r"Torch-Compiled Region: \d+/\d+$|.*CompiledFunction$")

# Its autograd function alone.
COMPILED_FUNCTION = re.compile(r".*CompiledFunction$")

COMPILED_NODE = re.compile(r".*CompiledFunctionBackward")

# First match wins; matched on operator names below `aten::` and on custom functions.
_FAMILIES = {
    "flash_attention": r"(?i).*(scaled_dot_product_flash|flash_attn|flash_attention|FlashAttn)",
    "efficient_attention": r"(?i).*(efficient_attention|fmha|xformers)",
    "cudnn_attention": r"(?i).*cudnn_attention",
    "attention": r"(?i).*(scaled_dot_product|flex_attention|attention)",
    "conv": r"aten::.*conv(olution|\d|_)",
    "gemm": r"aten::(linear|matmul|mm|bmm|addmm|baddbmm|einsum|_scaled_mm)$",
    "norm": r"aten::.*(_norm|rms_norm|norm)$",
    "embedding": r"aten::embedding",
    "loss": r"aten::.*(_loss$|cross_entropy)",
    "dropout": r"aten::.*dropout",
    "softmax": r"aten::.*softmax",
    "activation": r"aten::(relu|gelu|silu|sigmoid|tanh|elu|leaky_relu|hardtanh|clamp_min|mish)_?$",
    "pooling": r"aten::.*pool",
    "copy": r"aten::(copy_|to|_to_copy|contiguous|clone|cat|stack)$",
}
_PATTERNS = {family: re.compile(text) for family, text in _FAMILIES.items()}
# `flash_attn_3::bwd` is a backward operator as much as `aten::convolution_backward`.
_BACKWARD = re.compile(r"bwd|backward", re.I)
OTHER_FAMILY = ("other", "other")
# The same few names come up again and again, in one trace and in the traces of other ranks.
_remembered = lru_cache(maxsize=4096)


def same_work(names: Sequence[str]) -> NDArray[np.int64]:
    """For each name: the place of the first that means the same work, in another version."""
    first: dict[str, int] = {}
    same = (COMPILED_REGION.sub(r"\1", name) for name in names)
    return np.array([first.setdefault(name, at) for at, name in enumerate(same)], np.int64)


@_remembered
def family_of(name: str) -> tuple[str, str]:
    """Family and kind of an operator by its name; ``("other", "other")`` where none fits."""
    for family, pattern in _PATTERNS.items():
        if pattern.match(name):
            return family, "attention" if family.endswith("attention") else family
    return OTHER_FAMILY


def only_forward(name: str) -> bool:
    """Is it costly forward work that is never in an ordinary backward pass?

    A backward pass multiplies matrices too, but by ``mm`` and ``bmm``.
    """
    if name in {"aten::linear", "aten::addmm"}:
        return True
    return family_of(name)[1] in {"attention", "conv"} and not _BACKWARD.search(name)


# Norms by their forward names; their formulas are `native_layer_norm_backward` and the like.
_NORM = re.compile(
    r"aten::(native_|_native_|cudnn_|miopen_|_fused_)?(layer|batch|group|instance|rms)_norm"
    r"(_legit|_legit_no_training)?$"
)


# How torch lets an operator or a function be called.
_WRITTEN = re.compile(r"[\w:.]{1,120}", re.ASCII)


@_remembered
def multiplies(name: str) -> bool:
    """Is it a product, a convolution or attention?"""
    return family_of(name)[1] in {"gemm", "attention", "conv"}


@_remembered
def light_forward(name: str) -> bool:
    """The same of lighter work: dropout, softmax, activations, embeddings, pooling."""
    kind = family_of(name)[1]
    light = kind in {"dropout", "softmax", "activation", "embedding", "pooling"}
    return light and not _BACKWARD.search(name) and bool(_WRITTEN.fullmatch(name))


@_remembered
def forward_only(name: str) -> bool:
    """Is it heavy work that by its name belongs to a forward pass, and to no gradient's formula?"""
    return (only_forward(name) or bool(_NORM.match(name))) and bool(_WRITTEN.fullmatch(name))


@_remembered
def plain(name: str) -> str:
    """``aten::_softmax``, ``softmax_`` and ``Softmax`` are all ``softmax``: what a node shares with
    its operator.
    """
    return re.sub(r"[\W_\d]", "", name.rpartition("::")[2]).lower()
