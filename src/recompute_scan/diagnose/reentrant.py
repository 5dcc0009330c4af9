"""Failures of the reentrant variant: what it asks of its inputs, and of whoever takes it."""

from __future__ import annotations

import re

from msgspec.structs import replace

from recompute_scan.frameworks import gradients
from recompute_scan.frameworks.signature import Signature, innermost

_TORCH = "https://github.com/pytorch/pytorch/issues/"
_HF = "https://github.com/huggingface/transformers/issues/"
_DOCS = "https://docs.pytorch.org/docs/stable/checkpoint.html"

# The warning of torch that is before the error, or is all there is.
NO_INPUT_GRAD = "None of the inputs have requires_grad=True. Gradients will be None"

_NON_REENTRANT = "Use the non-reentrant variant: use_reentrant=False"

SILENT = Signature(
    code="RS104",
    name="checkpoint-without-gradient",
    cause_name="silent",
    message=re.compile(r"(?!)"),
    severity="warning",
    title="Weights inside a reentrant checkpoint get no gradient: they are not trained",
    cause=(
        "The reentrant variant runs the block without gradients and connects its output to "
        "its inputs. No input of this one needs a gradient, so the block's weights get none. "
        "Whatever is trainable after the block trains on, and nothing fails."
    ),
    fix=(
        f"{_NON_REENTRANT}. Or call model.enable_input_require_grads() before "
        "training. If the block is meant to stay frozen, don't checkpoint it."
    ),
    gradients=gradients.NON_REENTRANT,
    versions="torch, reentrant checkpoints; transformers before 5.0 by default.",
    sources=("https://github.com/huggingface/peft/issues/137", _DOCS),
    checked="reproduced",
)

WARNED = replace(
    SILENT,
    cause_name="warned",
    message=re.compile(re.escape(NO_INPUT_GRAD)),
    error=r"\w*Warning",
    notice=True,
    unsure=True,
    severity="info",
    title="torch warned that no input of a reentrant checkpoint needs a gradient",
    cause=(
        "In training it means that the block's weights get no gradient and are not trained. In "
        "evaluation, under no_grad and for blocks that are frozen it means nothing. The warning "
        "does not tell which."
    ),
    fix=(
        "Look whether the block's weights change. If they should and do not: "
        f"{_NON_REENTRANT[0].lower()}{_NON_REENTRANT[1:]}, or call "
        "model.enable_input_require_grads() before training."
    ),
    checked="message",
)

_UNSAID = Signature(
    code="RS124",
    name="variant-not-chosen",
    cause_name="warning",
    message=re.compile(
        r"use_reentrant parameter should be\s+passed explicitly|please pass in use_reentrant"
    ),
    error=r"\w*Warning",
    notice=True,
    severity="info",
    title="A checkpoint was called without saying which variant is meant",
    cause="torch then takes the reentrant one, and says that this will change.",
    fix=f"Say it. {_NON_REENTRANT}, unless you know that you need the other.",
    gradients=gradients.NON_REENTRANT,
    versions="torch 2.1 and later; transformers before 4.38 calls it so.",
    sources=(f"{_HF}26969", _DOCS),
    checked="reproduced",
)

SIGNATURES = (
    Signature(
        code="RS104",
        name="checkpoint-without-gradient",
        cause_name="raised",
        error="RuntimeError",
        message=re.compile(r"^element 0 of tensors does not require grad"),
        beside=re.compile(re.escape(NO_INPUT_GRAD)),
        title="A reentrant checkpoint got no input that needs a gradient, so nothing has one",
        cause=(
            "The reentrant variant runs the block without gradients and connects its output to "
            "its inputs. Where no input needs a gradient (frozen embeddings, as with LoRA), the "
            "output needs none either, and the block's own weights are forgotten."
        ),
        fix=(
            f"{_NON_REENTRANT}. Or call model.enable_input_require_grads() before "
            "training, which makes the embeddings' output need a gradient."
        ),
        gradients=gradients.NON_REENTRANT,
        versions="torch, reentrant checkpoints; transformers before 5.0 by default.",
        sources=(
            "https://github.com/huggingface/peft/issues/137",
            f"{_HF}26334",
            f"{_HF}42489",
        ),
        checked="reproduced",
    ),
    WARNED,
    Signature(
        code="RS105",
        name="reentrant-keyword-arguments",
        cause_name="keyword-arguments",
        error="ValueError",
        message=re.compile(r"^Unexpected keyword arguments: "),
        where=innermost(r"torch/utils/checkpoint\.py:checkpoint(?:_sequential)?$"),
        title="A reentrant checkpoint was given keyword arguments, which it does not take",
        cause="The reentrant variant passes positional arguments on to the block, and no others.",
        fix=f"{_NON_REENTRANT}. Or pass the arguments by position.",
        gradients=gradients.NON_REENTRANT,
        versions="All versions of torch, reentrant checkpoints.",
        sources=(_DOCS,),
        checked="reproduced",
    ),
    Signature(
        code="RS106",
        name="reentrant-under-autograd-grad",
        cause_name="grad",
        error="RuntimeError",
        message=re.compile(
            r"incompatible with \.grad\(\) or passing an `inputs`"
            r"|Checkpointing is not compatible with \.grad\(\)"
        ),
        title="A reentrant checkpoint was asked for the gradients of chosen inputs",
        cause=(
            "The reentrant variant starts a backward pass of its own for the whole block. It "
            "cannot serve torch.autograd.grad, or backward(inputs=...)."
        ),
        fix=(
            f"{_NON_REENTRANT}, where the checkpoint is torch's. Megatron-core's own has no such "
            "argument: there call .backward() on the loss, without inputs=, or leave "
            "--recompute-granularity out while torch.autograd.grad is needed."
        ),
        gradients=gradients.NON_REENTRANT,
        versions="All versions of torch, reentrant checkpoints.",
        sources=(f"{_TORCH}51743", _DOCS),
        checked="reproduced",
    ),
    Signature(
        code="RS107",
        name="frozen-checkpoint",
        cause_name="frozen",
        error="RuntimeError",
        message=re.compile(r"none of output has requires_grad=True,\s+this checkpoint\(\)"),
        title="A reentrant checkpoint wraps a block of which nothing needs a gradient",
        cause=(
            "The recompute found no output that needs a gradient. Either the block is frozen and "
            "cut off from its inputs, and there is nothing to recompute for; or it hands its "
            "tensors out inside an object that the checkpoint does not look into."
        ),
        fix=(
            "Don't checkpoint a frozen block. Of one that trains, return the tensors themselves, "
            "or a tuple of them."
        ),
        versions="All versions of torch, reentrant checkpoints.",
        sources=(_DOCS,),
        checked="reproduced",
    ),
    _UNSAID,
    replace(
        _UNSAID,
        cause_name="raised",
        error="ValueError",
        notice=False,
        severity="error",
        cause="This version of torch takes none for granted, and raises.",
        versions="Some releases and nightlies of torch from 2.2 on raise instead of warning.",
        sources=("https://github.com/open-mmlab/mmengine/issues/1539", _DOCS),
        checked="message",
    ),
)
