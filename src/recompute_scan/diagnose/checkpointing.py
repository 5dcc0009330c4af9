"""Failures of checkpoints in their surroundings: policies, devices, graphs and switches."""

from __future__ import annotations

import re

from recompute_scan.frameworks import gradients
from recompute_scan.frameworks.signature import Signature, some

_TORCH = "https://github.com/pytorch/pytorch/issues/"
_HF = "https://github.com/huggingface/transformers/issues/"
_DOCS = "https://docs.pytorch.org/docs/stable/checkpoint.html"
_CHECKPOINT_FILE = r"torch/utils/checkpoint\.py:"

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
)
