"""Failures of DDP and FSDP that activation checkpointing brings about, or that are in its way."""

from __future__ import annotations

import re

from recompute_scan.diagnose.tracebacks import doing
from recompute_scan.frameworks import registry
from recompute_scan.frameworks.base import NON_REENTRANT
from recompute_scan.frameworks.detect import Signature, some

_TORCH = "pytorch/pytorch/issues/"

SIGNATURES = (
    Signature(
        code="RS111",
        cause_name="reentrant",
        error="RuntimeError",
        message=re.compile(r"Expected to mark a variable ready only once"),
        where=some(registry.either("backward")),
        title="DDP saw the gradient of one parameter twice in one backward pass",
        cause="""A reentrant checkpoint runs its own backward pass. With
            find_unused_parameters=True, DDP has already marked its parameters as ready. Or one
            checkpointed module runs more than once per forward pass. The message does not say
            which.""",
        fix="""Use the non-reentrant variant (use_reentrant=False), which helps in both cases. Or
            set find_unused_parameters=False if every parameter is used.""",
        gradients=NON_REENTRANT,
        versions="All versions of torch; reentrant checkpoints.",
        sources=("huggingface/accelerate/issues/389", "huggingface/transformers/issues/23018"),
        checked="reproduced",
    ),
    Signature(
        code="RS112",
        cause_name="unused",
        error="RuntimeError",
        message=re.compile(
            r"Expected to have finished reduction in the prior iteration"
            r"|LightningModule has parameters that were not used in producing the loss returned by"
        ),
        title="DDP waits for gradients of parameters that no loss uses",
        cause="Some parameters took no part in the loss, so their gradients never came.",
        fix="""First check that they are meant to be unused: inside a reentrant checkpoint they may
            get no gradient by mistake (RS104). If so, remove the unused branch, or set
            find_unused_parameters=True with non-reentrant checkpoints (RS111).""",
        gradients=NON_REENTRANT,
        versions="All versions of torch.",
        sources=(f"{_TORCH}43259",),
        checked="reproduced",
    ),
    Signature(
        code="RS113",
        cause_name="fsdp2",
        error="RuntimeError",
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
        error="AssertionError|ValueError|RuntimeError",
        message=re.compile(
            r"expected to be in states .{0,400}?TrainingState"
            r"|Expects `BACKWARD_PRE` or `BACKWARD_POST` state"
        ),
        title="FSDP was asked for something out of its order",
        cause="""Each forward pass of an FSDP unit needs one backward pass. A reentrant checkpoint,
            several forward passes, a backward outside the strategy, or saving during an exception
            break that order.""",
        fix="""If checkpoints are reentrant, use the non-reentrant variant. Start backward through
            the strategy, once per forward. FSDP2 has no such states.""",
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
        error="AssertionError|RuntimeError",
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
        error="ValueError",
        message=re.compile(
            r"Must flatten tensors with uniform `?requires_grad`?"
            r"|FlatParameter\S{0,9} requires uniform `?requires_grad`?"
        ),
        title="One FSDP unit holds frozen and trainable parameters",
        cause="""FSDP1 flattens a unit's parameters into one, which either needs a gradient or does
            not. LoRA mixes both.""",
        fix="""Pass use_orig_params=True, or wrap the frozen part in its own units (peft's
            fsdp_auto_wrap_policy does).""",
        versions="FSDP1; seen with torch 2.13.",
        sources=(f"{_TORCH}104690", "huggingface/peft/issues/1702"),
        checked="reproduced",
    ),
    Signature(
        code="RS116",
        cause_name="flattening",
        error="ValueError",
        message=re.compile(
            r"Must flatten tensors with uniform dtype|FlatParameter\S{0,9} requires uniform dtype"
        ),
        title="One FSDP unit holds parameters of different dtypes",
        cause="""FSDP1 flattens a unit's parameters into one tensor of one dtype. Usually float32
            adapters sit on a bfloat16 model.""",
        fix="""Wrap the adapters in their own units; or cast them to the model's dtype before
            wrapping. For quantized models set bnb_4bit_quant_storage to that dtype.""",
        gradients=(
            "Adapters that are cast to bfloat16 get gradients, updates and optimizer state that "
            "are rounded to 8 bits; separate units change nothing."
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
            piece. Without either, the weight was loaded wrongly.""",
        fix="""Call the wrapped model. For a call without gradients, such as generate(), wrap it
            in FullyShardedDataParallel.summon_full_params(model)
            (deepspeed.zero.GatheredParameters).""",
        gradients=(
            "Gradients inside summon_full_params are not reduced over the ranks: never train there."
        ),
        versions="FSDP1, all versions (also DeepSpeed ZeRO-3, which gathers in the same way).",
        sources=(f"{_TORCH}109385", f"{_TORCH}124019"),
        checked="reproduced",
    ),
    Signature(
        code="RS118",
        cause_name="no-accelerator",
        error="RuntimeError",
        message=re.compile(r"FSDP needs a non-CPU accelerator device"),
        title="FSDP found no GPU, and no device_id names the CPU",
        cause="Without device_id, FSDP looks for an accelerator.",
        fix="""On a CPU pass device_id=torch.device("cpu"). Otherwise find out why torch sees no
            GPU (torch.cuda.is_available()).""",
        versions="Seen with torch 2.13.",
        sources=("https://docs.pytorch.org/docs/stable/fsdp.html",),
        checked="reproduced",
    ),
)
