"""Failures of checkpoints in their surroundings: policies, devices, graphs and switches."""

from __future__ import annotations

import re

from recompute_scan.frameworks import gradients
from recompute_scan.frameworks.signature import Signature, innermost, some

_TORCH = "https://github.com/pytorch/pytorch/issues/"
_HF = "https://github.com/huggingface/transformers/issues/"
_DOCS = "https://docs.pytorch.org/docs/stable/checkpoint.html"
_CHECKPOINT_FILE = r"torch/utils/checkpoint\.py:"
_SWITCHES = r"(?:gradient|activation)_checkpointing_enable|enable_gradient_checkpointing"

SIGNATURES = (
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
        gradients=gradients.NON_REENTRANT,
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
        gradients=gradients.RANDOM_STATE,
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
        gradients=gradients.REENTRANT,
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
        gradients=gradients.RANDOM_STATE,
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
        gradients=gradients.NON_REENTRANT,
        versions="All versions of torch; vmap before 2.5.",
        sources=(f"{_TORCH}122729", f"{_TORCH}141845"),
        checked="reproduced",
    ),
)
