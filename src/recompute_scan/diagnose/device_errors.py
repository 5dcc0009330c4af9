"""Failures of memory and of parallel training.

- Memory that ran out: on the GPU, by what went on there, on the host, and pinned there.
- Failures of DDP and FSDP that activation checkpointing brings about, or that are in its way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace

from recompute_scan.crash import Frame
from recompute_scan.diagnose.tracebacks import activity, doing
from recompute_scan.frameworks import registry
from recompute_scan.frameworks.base import CHECKPOINTED, NON_REENTRANT
from recompute_scan.frameworks.detect import Signature, innermost, some

_TORCH = "pytorch/pytorch/issues/"
_CUDA_NOTES = "https://docs.pytorch.org/docs/stable/notes/cuda.html"
_ERRORS = r"OutOfMemoryError|RuntimeError|AcceleratorError|DistBackendError"
# Each device's allocator says the same after the device's name; Apple's is "MPS backend".
# torch before 0.4 gave CUDA's own words and the place, with "Host" in it for pinned memory. The
# last words come from its allocator that leaves the pool to CUDA (cudaMallocAsync).
_SAYS_FULL = (
    r"^(?:RuntimeError: )?(?:(?!CPU)[A-Z]{2,8}(?: backend)? out of (?:the )?memory\b"
    r"|cuda runtime error \(2\) ?: out of memory at \S{1,400}/THC(?!\w*Host)\w*\.\w+:\d"
    r"|Allocation on device\b|.{0,200}UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY\b)"
)
_FULL = re.compile(
    rf"{_SAYS_FULL}|^(?:CUDA|HIP) error: out of memory|Cuda failure (?:2 )?'out of memory'"
)
_ALLOCATOR = re.compile(_SAYS_FULL)
# torch 1.1 gives the number of the system's error alone: 12 is "cannot allocate memory".
_HOST = re.compile(
    r"^\[enforce fail at [^\]]{1,300}\] .{0,40}?DefaultCPUAllocator: (?:can't allocate|not enough) "
    r"memory|^\[enforce fail at CPUAllocator\.cpp:\d+\] posix_memalign\([^)]*\) == 0\. 12 vs 0"
)
# Functions that put a sharded state together, or its pieces; none that writes each rank's shard.
_TOGETHER = re.compile(registry.either("gathering"))
_OWN_SHARD = re.compile(r":_(?:sharded|local)_")
_COPIES_AT_ONCE = re.compile(r"""\.to\(\s{0,9}["']cpu["'].{0,200}non_blocking\s{0,9}=\s{0,9}True""")
# torch's save_on_cpu makes its host buffers so where it pins them, and in no other case.
_KEEPS_ON_HOST = innermost(r"torch/autograd/graph\.py:pack_to_cpu$")
_PINS = some(r":_?pin(?:_memory\w*)?$|/pin_memory\.py:")
_SAVES = doing("saving")
_OF_STEPS = {"recompute", "backward", "optimizer"}
# A training step or its caller, by its name or by its line.
_STEP = re.compile(r"[:.]\w*train(?:ing)?_(?:one_)?(?:step|batch|epoch)(?:$|\()")
_NO_GRADIENT = re.compile(r"torch/(?:utils/_contextlib|autograd/grad_mode)\.py:decorate_context$")
_SMALLER = (
    "Smaller micro-batches give the same gradient if the model has no BatchNorm and each loss is "
    "weighted by its share of the tokens."
)


def _gathers(frames: Sequence[Frame]) -> int | None:
    """The frame that saves, where a sharded state is put together under it."""
    found = _SAVES(frames)
    inner = [frame.site for frame in frames[found:]] if found is not None else []
    whole = any(map(_TOGETHER.search, inner)) and not any(map(_OWN_SHARD.search, inner))
    return found if whole else None


def _trains(frames: Sequence[Frame]) -> int | None:
    """The frame that shows a training step, its forward pass too; other activities come first."""
    found = activity(frames)
    if found is not None:
        return found[1] if found[0] in _OF_STEPS else None
    for index in range(len(frames) - 1, -1, -1):
        frame = frames[index]
        if _STEP.search(frame.site) or _STEP.search(frame.source or ""):
            return index
        if _NO_GRADIENT.search(frame.site):
            return None
    return None


def _pinned(frames: Sequence[Frame]) -> int | None:
    """A frame that pins, or an innermost one that copies to the host without waiting."""
    source = frames[-1].source or ""
    found = _PINS(frames)
    if found is None and _COPIES_AT_ONCE.search(source):
        return len(frames) - 1
    if found is None and "torch.empty(" in source:
        return _KEEPS_ON_HOST(frames)
    return found


_DEVICE = Signature(
    code="RS120",
    cause_name="device",
    error=_ERRORS,
    message=_ALLOCATOR,
    title="The GPU ran out of memory",
    cause="The program needs more memory than there is. The frames do not show what it was doing.",
    fix="""In a training step, checkpoint whole layers once, non-reentrant, then use smaller
        micro-batches or offloading. In loading, evaluation or generation, checkpoints change
        nothing. A full traceback shows which.""",
    sources=(_CUDA_NOTES,),
)

# Where frames show what went on, the words of CUDA, HIP and NCCL say it too.
_FULL_ANYWHERE = replace(_DEVICE, message=_FULL)
_READY_TWICE = Signature(
    code="RS111",
    cause_name="reentrant",
    error="RuntimeError",
    message=re.compile(r"Expected to mark a variable ready only once"),
    where=some(registry.either("backward")),
    title="DDP saw the gradient of one parameter twice in one backward pass",
    cause="""A reentrant checkpoint runs its own backward pass. The parameter was ready before: by
        find_unused_parameters=True, by a module that runs twice per step, or by a loss that uses
        the parameter outside the checkpoint. The message does not say which.""",
    fix="""If torch's function checkpoints, use the non-reentrant variant: use_reentrant=False
        (torch 1.11 and later). A library's own function, such as fairscale's, has no such argument:
        use torch's, or switch these checkpoints off. If find_unused_parameters is the reason and
        every parameter is used, set it to False.""",
    gradients=NON_REENTRANT,
    versions="All versions of torch; reentrant checkpoints.",
    sources=("huggingface/accelerate/issues/389", "huggingface/transformers/issues/23018"),
    checked="reproduced",
)

SIGNATURES = (
    Signature(
        code="RS129",
        cause_name="host",
        error="RuntimeError",
        message=_HOST,
        title="The host's memory ran out; the GPU's own memory is not the cause",
        cause="""torch asked the system for memory and got none. The bytes in the message are one
            tensor's size.""",
        fix="""Check your innermost line in the traceback. If the size is huge, that tensor is too
            large. If small, look for whole data sets in memory, loader workers, predictions
            on the CPU, a copy of the weights per process (device_map can avoid it), or
            offloading. Checkpoints help only a model on the CPU.""",
        sources=("pytorch/pytorch/issues/31302",),
        checked="reproduced",
    ),
    Signature(
        code="RS127",
        cause_name="pinned",
        error=r"RuntimeError|AcceleratorError",
        message=re.compile(r"^(?:CUDA|HIP) error: out of memory"),
        where=_pinned,
        title="There was no pinned host memory left; the GPU's own memory is not the cause",
        cause="""Pinned memory is locked host memory. It runs out when host memory does, or at a
            limit on locked memory; CUDA reports both as "out of memory".""",
        fix="""Pin less: pin_memory=False, fewer workers, smaller offload buffers. The container (or
            WSL) may need more memory.""",
        sources=("deepspeedai/DeepSpeed/issues/2676", "deepspeedai/DeepSpeed/issues/6651"),
    ),
    Signature(
        code="RS128",
        cause_name="cache-blocks",
        message=re.compile(
            r"^No available memory for the cache blocks"
            r"|^To serve at least one request with the models?'s max seq len"
            r"|is larger than the maximum number of tokens that can be stored in KV cache"
        ),
        title="vLLM has no GPU memory left for its key-value cache",
        cause="""vLLM takes a share of the card for weights and cache. After the weights, too little
            of it is left for one cache block or the longest request.""",
        fix="""Raise gpu_memory_utilization if the card is free. If a trainer shares the card, lower
            max_model_len, or give vLLM more cards (tensor_parallel_size) or its own. Activation
            checkpoints don't matter here.""",
        versions="vLLM, all versions.",
        sources=("vllm-project/vllm/issues/2248",),
    ),
    Signature(
        code="RS207",
        cause_name="gathered",
        error=_ERRORS,
        message=_FULL,
        where=_gathers,
        title="The GPU ran out of memory while the state was gathered for saving",
        cause="A full state dict brings every parameter to one GPU before it is written.",
        fix="""Save a sharded state dict, or get it on every rank with CPU offload:
            `FullStateDictConfig(offload_to_cpu=True, rank0_only=True)` in FSDP1,
            `StateDictOptions(full_state_dict=True, cpu_offload=True)` in FSDP2. Under ZeRO-3 save
            the shards and join them with `zero_to_fp32.py`.""",
        versions="FSDP and ZeRO-3, all versions.",
        sources=("huggingface/accelerate/issues/3232", "huggingface/accelerate/pull/1181"),
    ),
    replace(
        _FULL_ANYWHERE,
        cause_name="saving",
        where=_SAVES,
        title="The GPU ran out of memory while saving",
        cause="""Saving copies state on the GPU: quantized weights into another layout, or shards
            into one piece. Recomputes play no part in it.""",
        fix="""Save only trained weights (an adapter), or move the state to the CPU first. Upgrade
            the library that the traceback ends in. Use smaller micro-batches in training.""",
        sources=("huggingface/peft/issues/447", _CUDA_NOTES),
    ),
    replace(
        _FULL_ANYWHERE,
        cause_name="evaluation",
        where=doing("evaluation"),
        title="The GPU ran out of memory while evaluating",
        cause="""Evaluation keeps the predictions of all batches, often full logits. Checkpoints
            change nothing without a backward pass.""",
        fix="""Use a smaller evaluation batch, and move predictions off the GPU
            (eval_accumulation_steps, preprocess_logits_for_metrics in transformers).""",
        sources=("huggingface/transformers/issues/7232", _CUDA_NOTES),
    ),
    replace(
        _FULL_ANYWHERE,
        cause_name="generation",
        where=doing("generation"),
        title="The GPU ran out of memory while generating",
        cause="""The key-value cache grows with every token and sequence. Checkpoints change
            nothing without a backward pass.""",
        fix="""Generate fewer or shorter sequences at once, or give an inference engine on the same
            card a smaller share.""",
        sources=("vllm-project/vllm/issues/188", _CUDA_NOTES),
    ),
    replace(
        _FULL_ANYWHERE,
        cause_name="loading",
        where=doing("loading"),
        title="The GPU ran out of memory while weights or state were loaded",
        cause="""The weights, or a second copy of them, do not fit. Checkpointing changes nothing
            without a backward pass.""",
        fix="""Load to the CPU first (map_location='cpu'), free earlier copies, shard or quantize
            the weights, and check for other processes (nvidia-smi).""",
        sources=("karpathy/nanoGPT/pull/236", _CUDA_NOTES),
    ),
    replace(
        _FULL_ANYWHERE,
        cause_name="training",
        where=_trains,
        title="The GPU ran out of memory in a training step",
        cause="""The step needs more memory than there is. Removing one of two doubled checkpoints
            does not raise the need; removing the only one does.""",
        fix="""Checkpoint whole layers, once, and non-reentrant: under FSDP2 the reentrant
            variant is known to grow until it fails. Then use smaller micro-batches, or
            offloading. For the optimizer's step use a sharded optimizer, or an 8-bit one with
            slightly other updates.""",
        gradients=f"{CHECKPOINTED} {_SMALLER}",
        versions="Not tied to a version; FSDP2 with reentrant checkpoints: open upstream.",
        sources=(f"{_TORCH}169349", _CUDA_NOTES),
    ),
    replace(_DEVICE, gradients=f"{CHECKPOINTED} {_SMALLER}"),
    _READY_TWICE,
    replace(
        _READY_TWICE,
        cause_name="unclear",
        where=None,
        fits=lambda raised: not raised.frames,
        unsure=True,
        checked="message",
        title="DDP saw a parameter's gradient twice; the log has no traceback",
        cause="""A reentrant checkpoint's own backward pass marked the parameter again, a module or
            parameter was used twice, or DDP misjudged which parameters are unused. Only the
            traceback shows which.""",
        fix="""If checkpoints are reentrant, use the non-reentrant variant (use_reentrant=False).
            Otherwise run each module once per step, or set find_unused_parameters=False.""",
    ),
    Signature(
        code="RS112",
        cause_name="unused",
        message=re.compile(
            r"Expected to have finished reduction in the prior iteration"
            r"|LightningModule has parameters that were not used in producing the loss returned by"
        ),
        title="DDP waits for gradients of parameters that no loss uses",
        cause="Some parameters took no part in the loss, so their gradients never came.",
        fix="""First check that they are meant to be unused: inside a reentrant checkpoint they may
            get no gradient by mistake (RS104). Remove intentionally unused branches, or set
            find_unused_parameters=True with non-reentrant checkpoints (RS111).""",
        gradients=NON_REENTRANT,
        versions="All versions of torch.",
        sources=(f"{_TORCH}43259",),
        checked="reproduced",
    ),
    Signature(
        code="RS112",
        cause_name="static-graph",
        error="RuntimeError",
        message=re.compile(r"Your training graph has changed in this iteration"),
        title="A step under DDP's static_graph differs from the first step",
        cause="""static_graph=True counts on the same parameters, as often, in every step. A step
            took another branch, or a forward pass had no backward pass.""",
        fix="""Set static_graph=False. If some steps leave parameters out, set
            find_unused_parameters=True with non-reentrant checkpoints (RS111).""",
        gradients=NON_REENTRANT,
        versions="torch 1.9 and later, with static_graph=True.",
        sources=(f"{_TORCH}58111",),
    ),
    Signature(
        code="RS113",
        cause_name="fsdp2",
        message=re.compile(r"got mixed torch\.Tensor and DTensor"),
        where=doing("recompute"),
        title="A recompute under FSDP2 met parameters that had been sharded again",
        cause="""A nested FSDP2 unit was sharded again between forward and recompute: two forward
            passes before one backward, or a reentrant checkpoint.""",
        fix="Use the non-reentrant variant, and shard whole blocks.",
        gradients=NON_REENTRANT,
        versions="FSDP2 before torch 2.13, according to reports.",
        sources=(f"{_TORCH}153354", "pytorch/pytorch/pull/171779"),
    ),
    Signature(
        code="RS114",
        cause_name="state",
        message=re.compile(
            r"expected to be in states .{0,400}?TrainingState"
            r"|Expects `BACKWARD_PRE` or `BACKWARD_POST` state"
        ),
        title="FSDP was called out of order",
        cause="""Each forward pass of an FSDP unit needs one backward pass. A reentrant checkpoint,
            several forward passes, a backward outside the framework, or saving during an exception
            break that order.""",
        fix="""If checkpoints are reentrant, use the non-reentrant variant. Start backward as
            your framework does, once per forward. FSDP2 has no such states.""",
        gradients=NON_REENTRANT,
        versions="FSDP1, all versions; fairscale.",
        sources=(
            "Lightning-AI/pytorch-lightning/issues/19626",
            "facebookresearch/fairscale/issues/617",
            f"{_TORCH}148756",
        ),
    ),
    Signature(
        code="RS114",
        cause_name="second-root",
        message=re.compile(r"Non-root FSDP instance's `_is_root` should not have been set yet"),
        title="An inner FSDP unit was used before the model that holds it",
        cause="""The first unit that is called, or saved, becomes the root. Here an inner unit came
            first, alone or as part of another wrapped model.""",
        fix="""Call and save through the outermost wrapped model, and wrap a model once. FSDP2
            finds its root in the same way.""",
        versions="FSDP1, all versions; seen with torch 2.13.",
        sources=(f"{_TORCH}113496",),
        checked="reproduced",
    ),
    Signature(
        code="RS115",
        cause_name="flattening",
        message=re.compile(
            r"Must flatten tensors with uniform `?requires_grad`?"
            r"|FlatParameter\S{0,9} requires uniform `?requires_grad`?"
        ),
        title="One FSDP unit holds frozen and trainable parameters",
        cause="""FSDP1 flattens a unit's parameters into one, which either needs a gradient or does
            not. LoRA mixes both.""",
        fix="""Pass use_orig_params=True, or wrap the trainable part in its own units (peft's
            fsdp_auto_wrap_policy does).""",
        versions="FSDP1; seen with torch 2.13.",
        sources=(f"{_TORCH}104690", "huggingface/peft/issues/1702"),
        checked="reproduced",
    ),
    Signature(
        code="RS116",
        cause_name="flattening",
        message=re.compile(
            r"Must flatten tensors with uniform dtype|FlatParameter\S{0,9} requires uniform dtype"
        ),
        title="One FSDP unit holds parameters of different dtypes",
        cause="""FSDP1 flattens a unit's parameters into one tensor of one dtype. Usually float32
            adapters sit on a bfloat16 model.""",
        fix="""Wrap the adapters in their own units; or cast them to the model's dtype before
            wrapping. For quantized models set bnb_4bit_quant_storage to the model's dtype.""",
        gradients=(
            "Casting adapters to bfloat16 rounds their gradients, updates and optimizer state to "
            "bfloat16; separate units change nothing."
        ),
        versions="FSDP1; seen with torch 2.13.",
        sources=("huggingface/peft/issues/484",),
        checked="reproduced",
    ),
    Signature(
        code="RS117",
        cause_name="called-past-root",
        error="RuntimeError",
        message=re.compile(r"^'weight' must be 2-D"),
        sharded=some(registry.either("sharding")),
        title="A layer was called while its weight was a flat, sharded piece (FSDP, ZeRO-3)",
        cause="""FSDP and ZeRO-3 gather parameters when the unit is called. A direct call of a
            sub-module, generate() on the inner model, or an unwrapped second model sees the flat
            piece. Otherwise the weight was loaded wrongly.""",
        fix="""Call the wrapped model. Wrap a call without gradients, such as generate(), in
            FullyShardedDataParallel.summon_full_params(model) (ZeRO-3:
            deepspeed.zero.GatheredParameters).""",
        gradients=("Never train inside summon_full_params: ranks do not reduce gradients there."),
        versions="FSDP1, all versions (also DeepSpeed ZeRO-3, which gathers in the same way).",
        sources=(f"{_TORCH}109385", f"{_TORCH}124019"),
        checked="reproduced",
    ),
    Signature(
        code="RS118",
        cause_name="no-accelerator",
        message=re.compile(r"FSDP needs a non-CPU accelerator device"),
        title="FSDP found no GPU, and no device_id names the CPU",
        cause="Without device_id, FSDP looks for an accelerator.",
        fix="""On a CPU pass device_id=torch.device("cpu"). On GPU nodes see why torch finds
            none (torch.cuda.is_available()).""",
        versions="Seen with torch 2.13.",
        sources=("https://docs.pytorch.org/docs/stable/fsdp.html",),
        checked="reproduced",
    ),
)
