"""Failures of the reentrant variant: what it asks of its inputs, and of whoever takes it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace

from recompute_scan.crash import Frame
from recompute_scan.diagnose.places import evaluates
from recompute_scan.frameworks import gradients, known
from recompute_scan.frameworks.signature import Signature, innermost, some

_TORCH = "https://github.com/pytorch/pytorch/issues/"
_HF = "https://github.com/huggingface/transformers/issues/"
_DOCS = "https://docs.pytorch.org/docs/stable/checkpoint.html"

# The warning of torch that is before the error, or is all there is.
NO_INPUT_GRAD = "None of the inputs have requires_grad=True. Gradients will be None"

_NON_REENTRANT = "Use the non-reentrant variant: use_reentrant=False"

_OWN_BACKWARD = re.compile(known.either("backward"))
_ENGINE = re.compile(r"torch/autograd/(?:__init__|graph)\.py:")
_APPLIED = re.compile(r"torch/autograd/function\.py:apply$")
# Where a checkpoint function is called or takes its arguments, torch's and libraries' own.
_CALLED = re.compile(
    r"checkpoint\w{0,80}\.py:(?:checkpoint\w{0,80}|apply)$|tensor_parallel/random\.py:checkpoint$"
    r"|transformer_engine/pytorch/distributed\.py:checkpoint$"
)
# A stack that ends for want of room holds some 300 of them; nesting on purpose, a handful.
_DEEP = 20


def _walks_out(frames: Sequence[Frame]) -> int | None:
    """The backward pass of a reentrant checkpoint, where the engine failed right under it.

    The recompute has a graph of its own, which nobody has walked before: what was freed is outside.
    """
    for index in range(len(frames) - 2, 0, -1):
        if _OWN_BACKWARD.search(frames[index].site) and _APPLIED.search(frames[index - 1].site):
            return index if _ENGINE.search(frames[index + 1].site) else None
    return None


def _nested(frames: Sequence[Frame]) -> int | None:
    """The innermost call of a checkpoint, or its backward pass, where there are very many."""
    found = [
        index
        for index, frame in enumerate(frames)
        if _CALLED.search(frame.site) or _OWN_BACKWARD.search(frame.site)
    ]
    return found[-1] if len(found) >= _DEEP else None


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
        # In evaluation nothing needs a gradient, whatever was warned of before.
        fits=lambda raised: not evaluates(raised.frames),
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
        cause_name="library",
        error="RuntimeError",
        message=re.compile(r"Checkpointing is not compatible with \.grad\(\)"),
        where=innermost(r"^(?!.*torch/utils/checkpoint\.py)"),
        needs_frames=True,
        title="A library's own checkpoint was asked for the gradients of chosen inputs",
        cause=(
            "The checkpoint function of the last frame starts a backward pass of its own for the "
            "whole block. It cannot serve torch.autograd.grad, or backward(inputs=...)."
        ),
        fix=(
            "Call .backward() on the loss, without inputs=. Or switch the recompute off while "
            "torch.autograd.grad is needed: in Megatron-core --recompute-granularity, in NeMo "
            "recompute_granularity."
        ),
        versions="Megatron-core, all versions, and functions copied from it.",
        sources=("https://docs.nvidia.com/megatron-core/developer-guide/latest/index.html", _DOCS),
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
            f"{_NON_REENTRANT}. Or call .backward() on the loss, without inputs=. A library's own "
            "checkpoint may not have that argument."
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
    Signature(
        code="RS130",
        name="reentrant-limit",
        cause_name="outer-graph",
        error="RuntimeError",
        message=re.compile(r"^Trying to backward through the graph a second time"),
        where=_walks_out,
        needs_frames=True,
        title="A reentrant checkpoint's backward pass left its block, into a graph already freed",
        cause=(
            "The reentrant variant cuts the graph at tensors that are positional arguments. A "
            "tensor that needs a gradient and comes in another way (in a tuple or list, as a "
            "keyword, as an attribute, caught by a closure) brings its graph along. The first "
            "block that uses it walks that graph to its end and frees it, and the next one walks "
            "it again. Or a module kept the tensor from an earlier step. The frames do not tell "
            "which."
        ),
        fix=(
            "With torch's own function use the non-reentrant variant (use_reentrant=False), which "
            "makes one backward pass of all. A library's own reentrant function (Megatron's, "
            "DeepSpeed's, unsloth's) has no such argument: hand it every tensor that needs a "
            "gradient as a positional argument, or take the library's newest version. Detach what "
            "a module keeps from one step to the next."
        ),
        gradients=gradients.NON_REENTRANT,
        versions="All versions of torch, reentrant checkpoints.",
        sources=(
            "https://github.com/huggingface/diffusers/issues/12776",
            "https://github.com/unslothai/unsloth/issues/3592",
            _DOCS,
        ),
        checked="reproduced",
    ),
    Signature(
        code="RS130",
        name="reentrant-limit",
        cause_name="returned",
        error="TypeError",
        message=re.compile(
            r"^\w{0,80}[Cc]heckpoint\w{0,80}\.forward: expected (?:Tensor|Variable) or tuple"
        ),
        title="A reentrant checkpoint's block returned something else than tensors",
        cause=(
            "The block returns a tuple that holds a tuple (a key-value cache), a list or another "
            "object. This version of torch takes tensors, and one flat tuple of them."
        ),
        fix=(
            "Return tensors, or one flat tuple of them; with a key-value cache, train with "
            "use_cache=False. Or use the non-reentrant variant (use_reentrant=False), which takes "
            "any output. A newer torch raises nothing, and tensors that are inside another object "
            "get no gradient through the block (RS405)."
        ),
        gradients=gradients.NON_REENTRANT,
        versions="Seen with torch 1.7; torch 2.13 raises nothing.",
        sources=(f"{_HF}6564", "https://github.com/salesforce/BLIP/issues/81"),
    ),
    Signature(
        code="RS130",
        name="reentrant-limit",
        cause_name="arguments",
        error="TypeError",
        message=re.compile(r"^save_for_backward can only save variables, but argument \d+ is of "),
        where=some(_CALLED.pattern),
        needs_frames=True,
        title="A checkpoint that saves its arguments was given something else than tensors",
        cause=(
            "This checkpoint function saves every argument for the backward pass, and autograd "
            "saves tensors only: not a tuple, a list, a number or an object of settings."
        ),
        fix=(
            "Pass tensors (and None) as arguments, each by itself, and let the function reach the "
            "rest by a closure: checkpoint(lambda x: block(x, sizes), x). torch's own function "
            "takes other arguments from 1.10 on."
        ),
        versions="torch before 1.10; Megatron-core's own function (0.16.1).",
        sources=(
            f"{_TORCH}63394",
            "https://github.com/NVIDIA/Megatron-LM/issues/3643",
        ),
    ),
    Signature(
        code="RS130",
        name="reentrant-limit",
        cause_name="depth",
        error="RecursionError",
        message=re.compile(r"^maximum recursion depth exceeded"),
        where=_nested,
        needs_frames=True,
        title="Checkpoints inside each other used up Python's stack",
        cause=(
            "Each checkpoint that runs inside another takes several frames. Either the "
            "checkpointed function calls itself by mistake (a forward that was replaced by its own "
            "checkpoint), or they are nested on purpose, and deep. Old versions of torch also "
            "nested the backward passes of thousands that stand side by side."
        ),
        fix=(
            "Where forward was replaced, let the checkpoint call the original one. Otherwise nest "
            "fewer, or checkpoint several layers at once; for many side by side take a newer torch "
            "(2.13 runs 3,000)."
        ),
        versions="Nested: all versions of torch. Side by side: reported with torch 0.4.",
        sources=(f"{_TORCH}6959",),
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
