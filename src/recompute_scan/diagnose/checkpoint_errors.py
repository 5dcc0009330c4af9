"""Limits of reentrant checkpoints, and failures of policies, devices, graphs and switches."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace

from recompute_scan.crash import Frame, Raised
from recompute_scan.diagnose.tracebacks import doing, evaluates
from recompute_scan.frameworks import registry
from recompute_scan.frameworks.base import CHECKPOINT_DOCS, NON_REENTRANT, RANDOM_STATE, REENTRANT
from recompute_scan.frameworks.detect import Signature, innermost, is_applied, is_own_backward, some

_TORCH = "pytorch/pytorch/issues/"
_HF = "huggingface/transformers/issues/"

# The warning of torch that is before the error, or is all there is.
NO_INPUT_GRAD = "None of the inputs have requires_grad=True. Gradients will be None"

_NON_REENTRANT = "Use the non-reentrant variant: use_reentrant=False"

_OWN_BACKWARD = re.compile(registry.either("backward"))
_ENGINE = re.compile(r"torch/autograd/(?:__init__|graph)\.py:")
# Where a checkpoint function is called or takes its arguments, torch's and libraries' own.
_CALLED = re.compile(
    r"checkpoint\w{0,80}\.py:(?:checkpoint\w{0,80}|apply)$|tensor_parallel/random\.py:checkpoint$"
    r"|transformer_engine/pytorch/distributed\.py:checkpoint$"
)
_IN_CHECKPOINT = some(_CALLED.pattern)
_OWN_FUNCTION = r"(?:gradient|activation)_checkpoint\w{0,80}(?:/\w{1,80})?\.py:(?:for|back)ward$"
# Not what checks a recompute, nor what switches checkpointing on.
_OWN_CODE = re.compile(
    r"torch/utils/checkpoint\.py:(?:checkpoint(?:_sequential)?|detach_variable|forward|backward)$"
    rf"|-packages/\S{{1,300}}{_OWN_FUNCTION}"
    r"|checkpoint\w{0,80}(?:/__init__)?\.py:(?!_?(?:calc|init|is_|patch|prep|reset|set|unp|use))"
    r"\w{0,80}grad(?:ient)?_checkpoint\w{0,80}(?<!able)$"
)
_CALLS_BLOCK = re.compile(r"(?:function|fn|func|forward|layer|block|module)\w{0,80}(?:\[\w+\])?\(")
# Nothing else is called in the line.
_CALLS_FUNCTION = re.compile(r"[^()]*_gradient_checkpointing_func\([^()]*\)?[^()]*$")
_DEVICE_MODULES = re.compile(r"torch/(?:cuda/)?__init__\.py:|torch/random\.py:|contextlib\.py:")
# A stack that ends for want of room holds some 300 of them; nesting on purpose, a handful.
_DEEP = 20


def _walks_out(frames: Sequence[Frame]) -> int | None:
    """The backward pass of a reentrant checkpoint, where the engine failed right under it.

    The recompute has a new graph: a graph that was freed is outside.
    """
    for index in range(len(frames) - 2, 0, -1):
        if _OWN_BACKWARD.search(frames[index].site) and is_own_backward(frames, index):
            return index if _ENGINE.search(frames[index + 1].site) else None
    return None


def _asks_device(frames: Sequence[Frame]) -> int | None:
    """The checkpoint function, where it asks torch for the device itself, not the block."""
    index = len(frames) - 1
    while index > 0 and _DEVICE_MODULES.search(frames[index].site):
        index -= 1
    site = frames[index].site
    own = re.search(_OWN_FUNCTION, site) and is_applied(frames, index)
    return index if own or "utils/checkpoint.py:" in site else None


def _fails_itself(frames: Sequence[Frame]) -> int | None:
    """The innermost frame, where it is a checkpoint function's, and its line calls no block."""
    last = frames[-1]
    own = _OWN_CODE.search(last.site) and not _CALLS_BLOCK.search(last.source or "block(")
    return len(frames) - 1 if own else None


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
    cause_name="silent",
    severity="warning",
    title="Weights inside a reentrant checkpoint get no gradient: they are not trained",
    cause="""The reentrant variant connects a block's output to its inputs only. No input needs a
        gradient here, so the block's weights get none, while later layers still train.""",
    fix="""Use the non-reentrant variant: use_reentrant=False. Or give the block an input that needs
        a gradient (transformers: model.enable_input_require_grads()). Don't checkpoint a block
        that should stay frozen.""",
    gradients="The fix changes gradients: these weights get theirs and are trained.",
    versions="transformers before 5.0 by default.",
    sources=("huggingface/peft/issues/137", CHECKPOINT_DOCS),
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
    cause="""In training, the block's weights get no gradient. In evaluation, under no_grad and
        for frozen blocks the warning means nothing. It does not say which case this is.""",
    fix="""Check whether the block's weights change. If they should: use the non-reentrant variant
        (use_reentrant=False), or give the block an input that needs a gradient.""",
    versions="Not tied to a version.",
    checked="message",
)

_UNSAID = Signature(
    code="RS124",
    cause_name="warning",
    message=re.compile(
        r"use_reentrant parameter should be\s+passed explicitly|please pass in use_reentrant"
    ),
    error=r"\w*Warning",
    notice=True,
    severity="info",
    title="A checkpoint was called without saying which variant is meant",
    cause="torch takes the reentrant variant and warns that the default will change.",
    fix="Use the non-reentrant variant: use_reentrant=False, unless you need the reentrant one.",
    gradients=NON_REENTRANT,
    versions="torch 2.1 and later; transformers before 4.38 calls it so.",
    sources=(f"{_HF}26969", CHECKPOINT_DOCS),
    checked="reproduced",
)

_CACHE_TAKEN = re.compile(
    r"[Cc]ach.{1,20}is incompatible with gradient checkpointing.{0,80}?\. Setting "
)
_SWITCHED_ON = re.compile(f"{_CACHE_TAKEN.pattern}|{_UNSAID.message.pattern}")
_NO_GRADIENT = Signature(
    code="RS104",
    cause_name="raised",
    error="RuntimeError",
    message=re.compile(r"^element 0 of (?:tensors|variables) does not require grad"),
    nearby=re.compile(re.escape(NO_INPUT_GRAD)),
    # In evaluation nothing needs a gradient, whatever was warned of before.
    fits=lambda raised: not evaluates(raised.frames),
    title="No input of a reentrant checkpoint needs a gradient, so neither does the loss",
    cause="""The reentrant variant connects a block's output to its inputs only. If no input
        needs a gradient (frozen embeddings, as with LoRA), neither does the output.""",
    fix="""Use the non-reentrant variant: use_reentrant=False. Or call
        model.enable_input_require_grads() before training.""",
    gradients=NON_REENTRANT,
    versions="transformers before 5.0 by default.",
    sources=("huggingface/peft/issues/137", f"{_HF}26334", f"{_HF}42489"),
    checked="reproduced",
)

SIGNATURES = (
    _NO_GRADIENT,
    replace(
        _NO_GRADIENT,
        cause_name="switched-on",
        nearby=_SWITCHED_ON,
        unsure=True,
        title="Checkpointing is on, and the loss needs no gradient",
        cause="""Reentrant checkpoints without inputs that need gradients cause this. So do
            frozen weights, detach() and no_grad().""",
        versions="Not tied to a version.",
        checked="message",
    ),
    WARNED,
    Signature(
        code="RS105",
        cause_name="no-variant",
        error="ValueError|TypeError",
        message=re.compile(
            r"^Unexpected keyword arguments: (?:\w{1,80},)*use_reentrant\b"
            r"|(?:^|[\s.])checkpoint(?:_sequential|_wrapper)?\(\) got an unexpected keyword "
            r"argument 'use_reentrant'"
        ),
        title="This checkpoint function does not know use_reentrant",
        cause="""torch's checkpoint() takes use_reentrant from 1.11 on, and checkpoint_sequential()
            from 2.1 on. Other libraries' functions have their own arguments.""",
        fix="""If the function is torch's, upgrade torch. If it is a library's own, call torch's
            function instead.""",
        sources=("MCG-NJU/MeMOTR/issues/15", f"{_TORCH}62654"),
    ),
    Signature(
        code="RS105",
        cause_name="keyword-arguments",
        error="ValueError",
        message=re.compile(
            r"^Unexpected keyword arguments: |^Passing `context_fn` or `debug` is only supported"
        ),
        where=innermost(r"torch/utils/checkpoint\.py:checkpoint(?:_sequential)?$"),
        frameless=True,
        title="A reentrant checkpoint was given keyword arguments, which it does not take",
        cause="The reentrant variant passes only positional arguments on.",
        fix="Use the non-reentrant variant: use_reentrant=False. Positional arguments also work.",
        gradients=NON_REENTRANT,
        versions="All versions of torch.",
        sources=("huggingface/diffusers/issues/5557", CHECKPOINT_DOCS),
        checked="reproduced",
    ),
    Signature(
        code="RS106",
        cause_name="grad",
        message=re.compile(
            r"incompatible with \.grad\(\) or passing an `inputs`"
            r"|Checkpointing is not compatible with \.grad\(\)"
        ),
        title="A reentrant checkpoint was asked for the gradients of chosen inputs",
        cause="""The reentrant variant runs its own backward pass over the whole block. It cannot
            serve torch.autograd.grad or backward(inputs=...).""",
        fix="""Use the non-reentrant variant: use_reentrant=False. Plain loss.backward() (no
            inputs=) also works. Megatron-core's own function and copies of it lack use_reentrant:
            switch the recompute off (leave --recompute-granularity out).""",
        gradients=NON_REENTRANT,
        versions="Reentrant checkpoints of torch, and Megatron-core's (from logs).",
        sources=(f"{_TORCH}51743", CHECKPOINT_DOCS),
        checked="reproduced",
    ),
    Signature(
        code="RS107",
        cause_name="frozen",
        message=re.compile(r"none\s+of output has requires_grad=True,\s+this checkpoint\(\)"),
        title="A reentrant checkpoint wraps a block without any output that needs a gradient",
        cause="""No output of the recompute needs a gradient. The block is frozen and detached from
            its inputs, or returns its tensors inside an object.""",
        fix="Don't checkpoint a frozen block. If the block trains, return tensors in a tuple.",
        versions="All versions of torch.",
        sources=(CHECKPOINT_DOCS,),
        checked="reproduced",
    ),
    Signature(
        code="RS130",
        cause_name="outer-graph",
        error="RuntimeError",
        message=re.compile(r"^Trying to backward through the graph a second time"),
        where=_walks_out,
        title="A reentrant checkpoint's backward pass left its block, into a graph already freed",
        cause="""The reentrant variant cuts the graph at positional tensor arguments. A tensor in a
            tuple, list, keyword, attribute or closure brings its graph along: the first block
            frees it, and the next walks it again. So does a tensor that a module keeps from an
            earlier step.""",
        fix="""Use the non-reentrant variant: use_reentrant=False in torch's function, or
            DeepSpeed's non_reentrant_checkpoint. Megatron's and unsloth's functions have no such
            variant: pass tensors that need a gradient by position, or upgrade the library. Detach
            tensors that a module keeps between steps.""",
        gradients=NON_REENTRANT,
        versions="All versions of torch.",
        sources=(
            "huggingface/diffusers/issues/12776",
            "unslothai/unsloth/issues/3592",
            CHECKPOINT_DOCS,
        ),
        checked="reproduced",
    ),
    Signature(
        code="RS130",
        cause_name="returned",
        message=re.compile(
            r"^\w{0,80}[Cc]heckpoint\w{0,80}\.forward: expected (?:Tensor|Variable) or tuple"
        ),
        title="A reentrant checkpoint's block returned something other than tensors",
        cause="""The block returns a nested tuple (a key-value cache), a list or another object.
            This version of torch takes tensors or one flat tuple of them.""",
        fix="""Return tensors or one flat tuple; with a key-value cache, train with
            use_cache=False. Or use the non-reentrant variant (use_reentrant=False). A newer torch
            raises nothing, but tensors inside other objects get no gradient (RS405).""",
        gradients=NON_REENTRANT,
        versions="Seen with torch 1.7.",
        sources=(f"{_HF}6564", "salesforce/BLIP/issues/81"),
    ),
    Signature(
        code="RS130",
        cause_name="arguments",
        message=re.compile(r"^save_for_backward can only save variables, but argument \d+ is of "),
        where=_IN_CHECKPOINT,
        title="A checkpoint that saves its arguments was given something other than tensors",
        cause="""This function saves every argument for the backward pass, but autograd saves
            only tensors.""",
        fix="""Pass only tensors and None as arguments, and the rest by a closure:
            `checkpoint(lambda x: block(x, sizes), x)`. torch's function takes other arguments from
            1.10 on.""",
        versions="torch before 1.10; Megatron-core's own function (0.16.1).",
        sources=(f"{_TORCH}63394", "NVIDIA/Megatron-LM/issues/3643"),
    ),
    Signature(
        code="RS130",
        cause_name="depth",
        message=re.compile(r"^maximum recursion depth exceeded"),
        where=_nested,
        title="Nested checkpoints used up Python's stack",
        cause="""Each nested checkpoint takes several frames. A forward replaced by its own
            checkpoint calls itself, or the nesting is deep on purpose. Old torch also nested the
            backward passes of thousands of checkpoints in a row.""",
        fix="""If forward was replaced, let the checkpoint call the original. Otherwise nest fewer,
            or checkpoint several layers at once. For many in a row, upgrade torch (2.13 runs
            3,000).""",
        versions="Many checkpoints in a row: reported with torch 0.4.",
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
        title="torch refuses a checkpoint without a variant",
        cause="This version of torch has no default.",
        versions="Some releases and nightlies of torch from 2.2 on raise instead of warning.",
        sources=("open-mmlab/mmengine/issues/1539", CHECKPOINT_DOCS),
        checked="message",
    ),
)

_CHECKPOINT_FILE = r"torch/utils/checkpoint\.py:"
_RECOMPUTES = doing("recompute")
_READS_INPUT = innermost(rf"{_CHECKPOINT_FILE}|{registry.either('backward')}")
_EXPORTS = some(r"torch/(?:jit|onnx)/")
_SWITCHES = r"(?:gradient|activation)_checkpointing_enable|enable_gradient_checkpointing"


def _changed_in_place(frames: Sequence[Frame]) -> int | None:
    """The checkpoint that finds its input changed, or the recompute that cannot change it."""
    found = _READS_INPUT(frames)
    return _RECOMPUTES(frames) if found is None else found


# Where queries, keys, positions or masks do not fit each other.
_UNFIT = re.compile(
    r"^The (?:(?:expanded )?size of |shape of the mask )|^Expected size for first two dimensions of"
)
_LENGTH = re.compile(r"[(\[](?:\d{1,18}, ){0,8}(\d{1,18})[)\]]")


def _one_token(raised: Raised) -> bool:
    """Do two lengths differ by the token that is new, or is one of them that token alone?"""
    found = [int(length) for length in _LENGTH.findall(raised.message)[:2]]
    return len(found) > 1 and min(found) > 0 and (1 in found or abs(found[0] - found[1]) == 1)


_GENERATES = some(r"/generation/utils\.py:")
_UNCACHED = Signature(
    code="RS136",
    cause_name="checkpointed",
    error="RuntimeError|IndexError|ValueError",
    message=_UNFIT,
    where=_GENERATES,
    fits=lambda raised: (
        _one_token(raised)
        and (_IN_CHECKPOINT(raised.frames) or 0) > (_GENERATES(raised.frames) or 0)
    ),
    title="generate() ran in training mode, where checkpointing drops the key-value cache",
    cause="""With checkpointing on, transformers drops the cache in training mode, but generate()
        still passes only new tokens.""",
    fix="""Call model.eval() before generate() and model.train() after it. If a trainer calls it,
        upgrade the trainer or switch checkpointing off.""",
    versions="transformers from 4.37 on; 5.23 generates wrong tokens without an error.",
    sources=(f"{_HF}36051", "huggingface/trl/issues/2878"),
)

_SELECTIVE = Signature(
    code="RS108",
    cause_name="mutated",
    message=re.compile(r"Tensor cached during selective activation checkpoint has been mutated"),
    title="An output that a selective checkpoint keeps was changed in place",
    cause="""The policy keeps this operator's output, and later code changes it in place, as
        an adapter's `+=` does.""",
    fix="Write `out = out + ...`, or keep other operators, such as attention only.",
    versions="Selective checkpoints, public since torch 2.5.",
    sources=(CHECKPOINT_DOCS,),
    checked="reproduced",
)

CHECKPOINTING_SIGNATURES = (
    _SELECTIVE,
    replace(
        _SELECTIVE,
        cause_name="second-backward",
        message=re.compile(r"Trying to backward an extra time.{0,400}?selective", re.DOTALL),
        fits=lambda raised: not any("compiled_autograd" in one.site for one in raised.frames),
        title="A second backward pass went through a selective checkpoint",
        cause="""The first backward pass uses up what a selective checkpoint keeps. Compiled
            autograd can also run backward twice.""",
        fix="Add the losses up and call backward once, or drop the policy for that block.",
        sources=(f"{_TORCH}142862",),
    ),
    replace(
        _SELECTIVE,
        cause_name="other-operators",
        message=re.compile(r"encountered during backward,?\s+but not found in\s+storage"),
        title="The recompute of a selective checkpoint ran different operators from the original's",
        cause="""The recompute asked for the output of an operator that the first run never called.
            A router's counter, or a kernel chosen from a cache, can cause this.""",
        fix="Make the block do the same both times, or take that operator out of the policy.",
        sources=("NVIDIA-NeMo/Automodel/pull/3330",),
    ),
    replace(
        _SELECTIVE,
        cause_name="higher-order",
        error="NotImplementedError",
        message=re.compile(r"no rule registered for H.{1,200}?_Cach(?:ing|ed)TorchDispatchMode"),
        title="A selective checkpoint met an operator that this torch cannot keep or run again",
        cause="""A policy needs a rule for each higher-order operator, such as flex_attention.
            This version lacks it.""",
        fix="Upgrade torch (2.13 supports flex_attention), or drop the policy for that block.",
        versions="Reported in 2024 and 2025.",
        sources=(f"{_TORCH}147879", "pytorch/pytorch/pull/150080"),
        checked="message",
    ),
    Signature(
        code="RS109",
        cause_name="device",
        message=re.compile(
            r"device state was initialized in the forward pass\s+of a Checkpoint"
            r"|CUDA state was initialized in the forward pass\s+of a Checkpoint"
        ),
        title="The device was used for the first time inside a checkpointed block",
        cause="""A checkpoint saves the device's random state, but the block was the first to start
            the device.""",
        fix="""Use the device once before the first forward pass: `torch.zeros(1, device=...)`.
            Or, where nothing in the block draws random numbers, pass
            `preserve_rng_state=False`.""",
        gradients=RANDOM_STATE,
        versions="In torch 2.13's code; non-reentrant checkpoints.",
        sources=(CHECKPOINT_DOCS,),
    ),
    Signature(
        code="RS122",
        cause_name="deallocated",
        message=re.compile(r"graph\s+recording observed an input tensor deallocate"),
        unsure=True,
        title="A CUDA graph was recorded while a checkpoint released one of its inputs",
        cause="""The non-reentrant variant releases tensors while the graph is recorded, in another
            order than in the recompute.""",
        fix="""Compile without CUDA graphs (a mode other than reduce-overhead), or use the
            reentrant variant for these blocks.""",
        gradients=REENTRANT,
        versions="torch with mode='reduce-overhead'; open upstream.",
        sources=(f"{_TORCH}154306",),
    ),
    Signature(
        code="RS122",
        cause_name="random-state",
        error="RuntimeError",
        message=re.compile(r"current_seed(?: during CUDA graph capture)?"),
        where=some(_CHECKPOINT_FILE),
        title="A checkpoint read the random state while a CUDA graph was recorded",
        cause="""A checkpoint reads the random state, which is not allowed while a CUDA graph is
            recorded.""",
        fix="""Take checkpointed blocks out of the graph. Where nothing in them draws random
            numbers, pass preserve_rng_state=False.""",
        gradients=RANDOM_STATE,
        versions="torch with CUDA graphs.",
        sources=(f"{_TORCH}162504",),
    ),
    Signature(
        code="RS123",
        cause_name="offload",
        message=re.compile(
            r"[Cc]heckpoint_?[Ww]rapper[\w.]{0,80}\(?\)? got an unexpected keyword argument "
            r"'offload_to_cpu'"
        ),
        title="checkpoint_wrapper no longer takes offload_to_cpu",
        cause="The argument moved into another wrapper.",
        fix="Use offload_wrapper(checkpoint_wrapper(module)).",
        versions="torch from pull request 84907 (September 2022) on.",
        sources=("pytorch/pytorch/pull/84907", f"{_HF}30523"),
    ),
    Signature(
        code="RS131",
        cause_name="signature",
        message=re.compile(
            rf"(?:_set_gradient_checkpointing|{_SWITCHES})\(\) (?:got an unexpected keyword "
            r"argument|takes (?:from )?\d+|missing \d+ required)"
            r"|has no attribute '_set_gradient_checkpointing'"
        ),
        title="A method that switches checkpointing on does not fit its call",
        cause="""The method is missing or takes other arguments. Code that ships with a model
            (trust_remote_code, a fork, a plugin) fits one version of transformers or diffusers.""",
        fix="""Install the version that the model's code fits, or newer model code. From 4.35,
            transformers takes options in gradient_checkpointing_kwargs; from 4.36 it accepts the
            old argument `value`. In your own class, delete the method if the base class has
            one.""",
        versions="transformers 4.35 and later, diffusers 0.33 and later, with older models' code.",
        sources=(f"{_HF}27596", "zai-org/ChatGLM3/issues/380", "tianweiy/CausVid/issues/63"),
        checked="reproduced",
    ),
    Signature(
        code="RS131",
        cause_name="no-function",
        message=re.compile(r"attribute '_gradient_checkpointing_func'|^'NoneType' .* callable$"),
        fits=lambda raised: (
            "attribute" in raised.message
            or any(_CALLS_FUNCTION.match(one.source or "") for one in raised.frames[-1:])
        ),
        title="A module was to run checkpointed, and has no checkpoint function",
        cause="""Libraries set the flag gradient_checkpointing and the function together. Here
            only the flag was set, or code reads them where neither is set.""",
        fix="""Do not set the flag. Call model.gradient_checkpointing_enable() (since transformers
            5.23: activation_checkpointing_enable(); diffusers: enable_gradient_checkpointing()) on
            the whole, finished model. Or upgrade the library that sets it.""",
        versions="transformers 4.35 and later (seen with 5.23), diffusers 0.33.",
        sources=(f"{_HF}30264", f"{_HF}30544", "NVlabs/Sana/issues/170"),
        checked="reproduced",
    ),
    Signature(
        code="RS131",
        cause_name="unsupported",
        message=re.compile(
            r"^\w+ (?:does not support (?:gradient|activation) checkpointing"
            r"|is not compatible with gradient checkpointing\. Make sure)"
        ),
        title="This class of models has no checkpointing to switch on",
        cause="The model's code has no checkpointed layers, or does not declare them.",
        fix="""Remove the switch and wrap the layers from outside with torch's
            apply_activation_checkpointing; if the model has a key-value cache, set use_cache=False.
            Or upgrade the model's code. In your own class, checkpoint the layers and set the
            attribute that the library asks for (such as supports_gradient_checkpointing).""",
        sources=("mosaicml/llm-foundry/issues/399", "huggingface/transformers/issues/17464"),
        checked="reproduced",
    ),
    Signature(
        code="RS131",
        cause_name="wrong-name",
        message=re.compile(rf"has no attribute '(?:{_SWITCHES}|set_grad_checkpointing)'"),
        title="The object has no checkpointing switch of this name",
        cause="""Names differ: gradient_checkpointing_enable in transformers,
            enable_gradient_checkpointing in diffusers, set_grad_checkpointing in timm. Wrappers
            such as DistributedDataParallel and DeepSpeed's engine hide the model's methods.""",
        fix="""Call your library's method before wrapping, or on model.module. In a class that
            holds a model, write one that calls the inner model's. Or upgrade the library.""",
        sources=("cloneofsimo/lora/issues/126", "deepspeedai/DeepSpeedExamples/issues/578"),
    ),
    Signature(
        code="RS131",
        cause_name="embeddings",
        error="NotImplementedError",
        message=re.compile(""),
        where=some(r":enable_input_require_grads$"),
        title="enable_input_require_grads() found no input embeddings in the model",
        cause="""The class of the model, or of its vision tower, lacks get_input_embeddings(),
            which PEFT and trainers call where checkpointing is on.""",
        fix="Upgrade transformers (5.0 skips such parts), or define the method in the class.",
        versions="transformers before 5.0.",
        sources=("m87-labs/moondream/issues/91", "huggingface/transformers/pull/42558"),
    ),
    Signature(
        code="RS131",
        cause_name="device",
        error="AttributeError|RuntimeError|AssertionError|UnboundLocalError",
        message=re.compile(
            r"^module 'torch[\w.]{0,80}' has no attribute|had_\w{1,20}_in_fwd"
            r"|[Tt]orch (?:not compiled with|was compiled without) CUDA|^torch has no module of "
        ),
        where=_asks_device,
        title="A checkpoint function does not work on this device",
        cause="""A checkpoint needs the device's random state and autocast settings. This torch has
            none for the device (XLA, MPS, XPU, meta), or fails on CUDA (torch 1.11), or a
            library's function names CUDA.""",
        fix="""On XLA call torch_xla.utils.checkpoint.checkpoint; on MPS checkpoint nothing.
            Elsewhere upgrade the library or torch: newer torch supports XPU and meta.""",
        versions="MPS and XLA: not fixed upstream.",
        sources=(f"{_TORCH}127676", f"{_TORCH}128478", "pytorch/xla/issues/5766"),
    ),
    Signature(
        code="RS131",
        cause_name="function",
        error=r"(?:Type|Attribute|Value|Key|Index|Name|UnboundLocal|ZeroDivision|Runtime)Error",
        message=re.compile(""),
        where=_fails_itself,
        fits=lambda raised: raised.name != "RuntimeError" or "Boolean value of" in raised.message,
        unsure=True,
        title="A checkpoint function itself failed, not the block that it runs",
        cause="""It fails on some argument or result (None, an object, a functools.partial, too
            many segments), or two libraries' versions do not fit together.""",
        fix="""Pass and return only tensors, the rest in a closure; at most one segment per layer.
            Or upgrade the failing library (axolotl, LLaMA-Factory: April 2025 or newer), or use
            torch's function.""",
        sources=("axolotl-ai-cloud/axolotl/issues/2561", f"{_TORCH}152752"),
    ),
    Signature(
        code="RS134",
        cause_name="tracker",
        message=re.compile(r"^[Bb]ackward pass should have cleared tracker of all tensors"),
        title="Activation offloading began a forward pass with tensors left over from the last one",
        cause="""An output that no loss uses, or a forward pass inside a backward or without one,
            leaves tensors in the offloading's list.""",
        fix="""Switch offloading off and keep checkpointing: activation_offloading in TRL,
            enable_activation_offloading in torchtune. The step then needs more memory. axolotl has
            `activation_offloading: legacy`, which is slower.""",
        versions="TRL, torchtune and axolotl, as of 2025.",
        sources=("meta-pytorch/torchtune/issues/2709", "axolotl-ai-cloud/axolotl/pull/2928"),
    ),
    Signature(
        code="RS135",
        cause_name="in-place",
        error="RuntimeError",
        message=re.compile(
            r"^a (?:view of a )?leaf Variable that requires grad is being used in an in-place"
            r"|has been modified by an inplace operation"
        ),
        where=_changed_in_place,
        title="The input of a checkpointed block, or a weight in it, was changed in place",
        cause="""A checkpoint keeps its input and runs the block again on it. The block (`x += ...`,
            a ReLU with `inplace=True`) or code after it changed that tensor.""",
        fix="""Write `x = x + ...`, and `inplace=False` in the block's first operation, or pass
            `x.clone()` (one more input's memory). Change weights only after the backward pass.""",
        versions="All versions of torch.",
        sources=("https://docs.pytorch.org/docs/stable/notes/autograd.html",),
        checked="reproduced",
    ),
    _UNCACHED,
    replace(
        _UNCACHED,
        cause_name="warned",
        fits=_one_token,
        nearby=_CACHE_TAKEN,
        unsure=True,
        title="generate() failed after checkpointing dropped a key-value cache",
        cause="The log warns about use_cache. If generate() logged that, it ran in training mode.",
    ),
    Signature(
        code="RS132",
        cause_name="side-effects",
        error="Unsupported",
        message=re.compile(
            r"(?:HOP: (?:Unsafe|Non-nullified) side effect"
            r"|HigherOrderOperator: Mutating a variable not in the current scope)"
            r".{0,1000}?torch\.utils\.checkpoint",
            re.DOTALL,
        ),
        title="A checkpointed block changes something outside itself, and torch.compile refuses it",
        cause="""torch.compile turns a checkpoint into one operator, which must not change an
            attribute, counter or list outside the block. Run eagerly, the recompute changes it
            again.""",
        fix="""Return the value and store it outside the block. Or compile the layer inside the
            checkpoint. If the recompute may skip the change, set
            torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint to True.""",
        versions="torch.compile with fullgraph=True; seen with torch 2.13.",
        sources=("pytorch/torchtitan/issues/3104", f"{_TORCH}124866"),
        checked="reproduced",
    ),
    Signature(
        code="RS132",
        cause_name="transform",
        message=re.compile(
            r"^torch\.func(?: transforms|\.\{[\w, ]*\}) don't yet support saved tensor hooks"
            r"|^In order to use an autograd\.Function with functorch transforms"
        ),
        where=some(rf"{_CHECKPOINT_FILE}\w*checkpoint\w*$"),
        title="A checkpoint and a torch.func transform are nested",
        cause="""torch.func's grad, vjp, jacrev and hessian accept neither a non-reentrant
            checkpoint's hooks nor a reentrant one's autograd function.""",
        fix="""Remove the checkpoint there, or use torch.autograd.grad and
            torch.autograd.functional (with use_reentrant=False). vmap alone inside a checkpoint
            needs torch 2.5.""",
        gradients=NON_REENTRANT,
        versions="All versions of torch.",
        sources=(f"{_TORCH}122729", f"{_TORCH}141845"),
        checked="reproduced",
    ),
    Signature(
        code="RS132",
        cause_name="export",
        error="RuntimeError|NotSupportedError",
        message=re.compile(
            r"Couldn't export Python operator \w{0,80}Checkpoint|^(?:_Map_base|unordered_map)::at"
            r"|^Compiled functions can't take.{0,900}?Checkpoint a model or part of",
            re.DOTALL,
        ),
        fits=lambda raised: (
            "::at" not in raised.message
            or None not in (_EXPORTS(raised.frames), _IN_CHECKPOINT(raised.frames))
        ),
        title="A model with a checkpoint was traced, scripted or exported to ONNX",
        cause="""TorchScript, and the ONNX exporter that rests on it, cannot record a checkpoint
            function.""",
        fix="""Switch checkpointing off for the export; the results are the same:
            gradient_checkpointing_disable() in transformers, disable_gradient_checkpointing() in
            diffusers.""",
        versions="torch.export takes checkpoints (seen with 2.13).",
        sources=(f"{_TORCH}88286", f"{_TORCH}83349"),
    ),
)
