"""Limits of reentrant checkpoints, and checkpoints that cannot be switched on.

Failures of the reentrant variant: what it asks of its inputs, and of whoever takes it.

Failures of checkpoints in their surroundings: policies, devices, graphs and switches.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace

from recompute_scan.crash import Frame
from recompute_scan.diagnose.tracebacks import evaluates
from recompute_scan.frameworks import registry
from recompute_scan.frameworks.base import NON_REENTRANT, RANDOM_STATE, REENTRANT
from recompute_scan.frameworks.detect import Signature, innermost, some

_TORCH = "https://github.com/pytorch/pytorch/issues/"
_HF = "https://github.com/huggingface/transformers/issues/"
_DOCS = "https://docs.pytorch.org/docs/stable/checkpoint.html"

# The warning of torch that is before the error, or is all there is.
NO_INPUT_GRAD = "None of the inputs have requires_grad=True. Gradients will be None"

_NON_REENTRANT = "Use the non-reentrant variant: use_reentrant=False"

_OWN_BACKWARD = re.compile(registry.either("backward"))
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
    gradients=NON_REENTRANT,
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
    gradients=NON_REENTRANT,
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
        gradients=NON_REENTRANT,
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
        gradients=NON_REENTRANT,
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
        gradients=NON_REENTRANT,
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
        gradients=NON_REENTRANT,
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
        gradients=NON_REENTRANT,
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


_CHECKPOINT_FILE = r"torch/utils/checkpoint\.py:"
_SWITCHES = r"(?:gradient|activation)_checkpointing_enable|enable_gradient_checkpointing"

CHECKPOINTING_SIGNATURES = (
    Signature(
        code="RS108",
        name="selective-checkpoint-misuse",
        cause_name="mutated",
        error="RuntimeError",
        message=re.compile(
            r"Tensor cached during selective activation checkpoint has been mutated"
        ),
        title="An output that a selective checkpoint keeps was changed in place",
        cause=(
            "The policy keeps this operator's output for the recompute, and later code changes it "
            "in place: out += ..., or an adapter that adds its part so."
        ),
        fix="Write out = out + ... there, or keep other operators (attention only, for instance).",
        versions="Selective checkpoints, public since torch 2.5.",
        sources=(_DOCS,),
        checked="reproduced",
    ),
    Signature(
        code="RS108",
        name="selective-checkpoint-misuse",
        cause_name="second-backward",
        error="RuntimeError",
        message=re.compile(r"Trying to backward an extra time.{0,400}?selective", re.DOTALL),
        fits=lambda raised: not any("compiled_autograd" in one.site for one in raised.frames),
        title="A second backward pass went through a selective checkpoint",
        cause=(
            "What a selective checkpoint keeps is used up by the first backward pass. Compiled "
            "autograd, too, has run it twice where the script asks for it once."
        ),
        fix=(
            "Make one backward pass of it (add the losses up), or use a plain non-reentrant "
            "checkpoint there."
        ),
        gradients=NON_REENTRANT,
        versions="Selective checkpoints, public since torch 2.5.",
        sources=(f"{_TORCH}142862",),
        checked="reproduced",
    ),
    Signature(
        code="RS108",
        name="selective-checkpoint-misuse",
        cause_name="other-operators",
        error="RuntimeError",
        message=re.compile(r"encountered during backward,?\s+but not found in\s+storage"),
        title="The recompute of a selective checkpoint ran other operators than the original",
        cause=(
            "The recompute asked for the kept output of an operator that the first run never ran: "
            "the two took different ways (a kernel chosen from a cache, a counter of a router)."
        ),
        fix="Make the block do the same both times, or take that operator out of the policy.",
        versions="Selective checkpoints, public since torch 2.5.",
        sources=("https://github.com/NVIDIA-NeMo/Automodel/pull/3330",),
        checked="reproduced",
    ),
    Signature(
        code="RS109",
        name="device-started-in-checkpoint",
        cause_name="device",
        error="RuntimeError",
        message=re.compile(
            r"device state was initialized in the forward pass\s+of a Checkpoint"
            r"|CUDA state was initialized in the forward pass\s+of a Checkpoint"
        ),
        title="The device was used for the first time inside a checkpointed block",
        cause=(
            "A checkpoint keeps the state of the random numbers. It could not keep the device's, "
            "because that was started only inside the block."
        ),
        fix=(
            "Use the device once before the first forward pass: torch.zeros(1, device=...) does. "
            "Or, where nothing in the block draws random numbers, pass preserve_rng_state=False."
        ),
        gradients=RANDOM_STATE,
        versions="Read in torch 2.13; non-reentrant checkpoints.",
        sources=(_DOCS,),
    ),
    Signature(
        code="RS122",
        name="checkpoint-under-cuda-graph",
        cause_name="deallocated",
        error="RuntimeError",
        message=re.compile(r"graph\s+recording observed an input tensor deallocate"),
        unsure=True,
        title="A CUDA graph was recorded while a checkpoint released one of its inputs",
        cause=(
            "The non-reentrant variant releases tensors while the graph is recorded, and not in "
            "the same order when it is recomputed."
        ),
        fix=(
            "Compile without CUDA graphs (a mode other than reduce-overhead), or use the "
            "reentrant variant for these blocks."
        ),
        gradients=REENTRANT,
        versions="torch with mode='reduce-overhead'; open upstream.",
        sources=(f"{_TORCH}154306",),
    ),
    Signature(
        code="RS122",
        name="checkpoint-under-cuda-graph",
        cause_name="random-state",
        error="RuntimeError",
        message=re.compile(r"current_seed(?: during CUDA graph capture)?"),
        where=some(_CHECKPOINT_FILE),
        needs_frames=True,
        title="A checkpoint read the random state while a CUDA graph was recorded",
        cause="A checkpoint keeps the state of the random numbers, which a recording cannot read.",
        fix=(
            "Take the checkpointed blocks out of the graph. Where nothing in them draws random "
            "numbers, pass preserve_rng_state=False to their checkpoints."
        ),
        gradients=RANDOM_STATE,
        versions="torch with CUDA graphs.",
        sources=(f"{_TORCH}162504",),
    ),
    Signature(
        code="RS123",
        name="offload-keyword-removed",
        cause_name="offload",
        error="TypeError",
        message=re.compile(
            r"[Cc]heckpoint_?[Ww]rapper[\w.]{0,80}\(?\)? got an unexpected keyword argument "
            r"'offload_to_cpu'"
        ),
        title="checkpoint_wrapper no longer takes offload_to_cpu",
        cause="The argument moved into a wrapper of its own.",
        fix="Use offload_wrapper(checkpoint_wrapper(module)) in its place.",
        versions="torch from pull request 84907 (September 2022) on.",
        sources=("https://github.com/pytorch/pytorch/pull/84907", f"{_HF}30523"),
    ),
    Signature(
        code="RS131",
        name="checkpointing-not-switched-on",
        cause_name="signature",
        error="TypeError|AttributeError",
        message=re.compile(
            rf"(?:_set_gradient_checkpointing|{_SWITCHES})\(\) (?:got an unexpected keyword "
            r"argument|takes (?:from )?\d+|missing \d+ required)"
            r"|has no attribute '_set_gradient_checkpointing'"
        ),
        title="The model's code and the library that switches checkpointing on do not fit together",
        cause=(
            "The library calls the model's method with arguments that it does not take, or calls "
            "one that it does not have. Code that comes with a model (trust_remote_code, a fork, a "
            "plugin) is written for one version of transformers or diffusers."
        ),
        fix=(
            "Take the library's version that the model's code was written for, or newer code of "
            "the model. transformers changed the call in 4.35 and takes the old form with `value` "
            "again from 4.36 on; diffusers changed it in 0.33. If you wrote the class, delete the "
            "method: the base class has one."
        ),
        versions="transformers 4.35 and later, diffusers 0.33 and later, with older models' code.",
        sources=(
            f"{_HF}27596",
            "https://github.com/zai-org/ChatGLM3/issues/380",
            "https://github.com/tianweiy/CausVid/issues/63",
        ),
        checked="reproduced",
    ),
    Signature(
        code="RS131",
        name="checkpointing-not-switched-on",
        cause_name="no-function",
        error="AttributeError",
        message=re.compile(r"has no attribute '_gradient_checkpointing_func'"),
        title="A model's checkpointing flag was set past its method, so it has no function to call",
        cause=(
            "transformers sets the flag gradient_checkpointing and the checkpoint function "
            "together. Here only the flag is set: by hand, by a library, or on another module than "
            "the one that asks for the function."
        ),
        fix=(
            "Leave the flag alone, and call model.gradient_checkpointing_enable() (from "
            "transformers 5.23 on activation_checkpointing_enable()) on the whole model, after its "
            "last module was made."
        ),
        versions="transformers 4.35 and later; seen with 5.23.",
        sources=(f"{_HF}30264", f"{_HF}30544"),
        checked="reproduced",
    ),
    Signature(
        code="RS131",
        name="checkpointing-not-switched-on",
        cause_name="unsupported",
        error="ValueError",
        message=re.compile(
            r"^\w+ (?:does not support (?:gradient|activation) checkpointing"
            r"|is not compatible with gradient checkpointing\. Make sure)"
        ),
        title="This class of models has no checkpointing to switch on",
        cause="Its code has no checkpointed layers, or does not say that it has.",
        fix=(
            "Leave the switch out and wrap the layers from outside: torch's "
            "apply_activation_checkpointing with checkpoint_wrapper, or under FSDP fsdp_config's "
            "activation_checkpointing; train with use_cache=False then. Or take newer code of the "
            "model, which may have it. If you wrote the class, set supports_gradient_checkpointing "
            "= True and derive the layers from transformers' GradientCheckpointingLayer."
        ),
        versions="transformers and diffusers, all versions.",
        sources=(
            "https://github.com/mosaicml/llm-foundry/issues/399",
            "https://github.com/huggingface/transformers/issues/17464",
        ),
        checked="reproduced",
    ),
    Signature(
        code="RS131",
        name="checkpointing-not-switched-on",
        cause_name="wrong-name",
        error="AttributeError",
        message=re.compile(rf"has no attribute '(?:{_SWITCHES}|set_grad_checkpointing)'"),
        title="The object has no method of this name that switches checkpointing on",
        cause=(
            "Libraries name it differently: transformers gradient_checkpointing_enable (from 5.23 "
            "on activation_checkpointing_enable), diffusers enable_gradient_checkpointing, timm "
            "set_grad_checkpointing. And a wrapper hides the model's methods: "
            "DistributedDataParallel, DeepSpeed's engine, a class around the model."
        ),
        fix=(
            "Call it before the model is wrapped, or on the model inside (model.module). Take the "
            "name that the model's library has. A class that holds a model needs a method that "
            "calls the inner model's."
        ),
        versions="Not tied to a version.",
        sources=(
            "https://github.com/cloneofsimo/lora/issues/126",
            "https://github.com/deepspeedai/DeepSpeedExamples/issues/578",
        ),
    ),
    Signature(
        code="RS131",
        name="checkpointing-not-switched-on",
        cause_name="partial",
        error="AttributeError",
        message=re.compile(r"'functools\.partial' object has no attribute '__self__'"),
        where=innermost(r"checkpoint"),
        needs_frames=True,
        title="A checkpoint function looks for a layer's method, and was handed a partial",
        cause=(
            "transformers hands the layer's call to the checkpoint function inside a "
            "functools.partial. The function of this library asks the method for its layer."
        ),
        fix=(
            "Take a newer version of the library whose frame is the last (axolotl and "
            "LLaMA-Factory were mended in April 2025), or its plain checkpointing without "
            "offloading."
        ),
        versions="transformers 4.51 and later, with axolotl and LLaMA-Factory of before.",
        sources=(
            "https://github.com/axolotl-ai-cloud/axolotl/issues/2561",
            "https://github.com/hiyouga/LlamaFactory/issues/7699",
        ),
    ),
    Signature(
        code="RS132",
        name="checkpoint-under-transform",
        cause_name="side-effects",
        error="Unsupported",
        message=re.compile(
            r"(?:HOP: (?:Unsafe|Non-nullified) side effect"
            r"|HigherOrderOperator: Mutating a variable not in the current scope)"
            r".{0,1000}?torch\.utils\.checkpoint",
            re.DOTALL,
        ),
        title="A checkpointed block changes something outside itself, and torch.compile refuses it",
        cause=(
            "torch.compile makes one operator of a checkpoint, which must not change what is "
            "outside: an attribute, a counter, a list. In the eager recompute the change would be "
            "made a second time."
        ),
        fix=(
            "Move the change out of the block: return the value, and store it outside. Or compile "
            "the layer inside the checkpoint instead of around it. Where the recompute may leave "
            "the change out, torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = "
            "True lets it pass."
        ),
        versions="torch.compile with fullgraph=True; seen with torch 2.13.",
        sources=(
            "https://github.com/pytorch/torchtitan/issues/3104",
            f"{_TORCH}124866",
        ),
        checked="reproduced",
    ),
    Signature(
        code="RS132",
        name="checkpoint-under-transform",
        cause_name="transform",
        error="RuntimeError",
        message=re.compile(
            r"^torch\.func(?: transforms|\.\{[\w, ]*\}) don't yet support saved tensor hooks"
            r"|^In order to use an autograd\.Function with functorch transforms"
        ),
        where=some(rf"{_CHECKPOINT_FILE}\w*checkpoint\w*$"),
        needs_frames=True,
        title="A checkpoint and a torch.func transform are inside each other",
        cause=(
            "torch.func's grad, vjp, jacrev and hessian allow neither the hooks of a "
            "non-reentrant checkpoint nor the autograd function of a reentrant one."
        ),
        fix=(
            "Leave the checkpoint out there, or take torch.autograd.grad and "
            "torch.autograd.functional in place of torch.func (with use_reentrant=False). vmap by "
            "itself inside a checkpoint needs torch 2.5."
        ),
        gradients=NON_REENTRANT,
        versions="All versions of torch; vmap before 2.5.",
        sources=(f"{_TORCH}122729", f"{_TORCH}141845"),
        checked="reproduced",
    ),
)
