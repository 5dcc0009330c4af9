"""PyTorch's own checkpointing, asked for by the user's code or a library's.

``torch/utils/checkpoint.py``, ``torch/distributed/_composable/checkpoint_activation.py``, the
wrapper in ``torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py`` (a module of class
``CheckpointWrapper``), and ``torch._functorch.config.activation_memory_budget``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from recompute_scan.crash import Frame
from recompute_scan.frameworks.base import CHECKPOINT_DOCS, NON_REENTRANT, Edit, Mechanism
from recompute_scan.frameworks.detect import Signature, innermost, is_own_backward

# Private names of torch that the frames of a stack and the patches of a recording are known by.
CHECKPOINT_FILE = "torch/utils/checkpoint.py"
# Generators behind a non-reentrant checkpoint. From 2.14 on `checkpoint` calls the first; the
# second remains, and passes on to it.
GENERATORS = (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
)
# The function in torch/autograd/graph.py by which torch.autograd starts every backward pass.
RUN_BACKWARD = "_engine_run_backward"

_ASKS_GRAD = innermost(rf"torch/autograd/(?:__init__\.py:grad|graph\.py:{RUN_BACKWARD})$")


def _differentiates(frames: Sequence[Frame]) -> int | None:
    """The backward() of an autograd function written in Python, where it calls autograd.grad."""
    own = (n for n in range(len(frames) - 1, 0, -1) if is_own_backward(frames, n))
    return next(own, None) if _ASKS_GRAD(frames) is not None else None


_VARIANTS = ("use_reentrant as passed; without it reentrant (as of torch 2.14)",)
ANYWHERE = ("*",)
_of_torch = partial(Mechanism, docs=CHECKPOINT_DOCS, checked="ran here (torch 2.13.0)")

# Made for FSDP, and shared by all mechanisms that apply it. A second application wraps again.
WRAPPER = Mechanism(
    name="fsdp-wrapper",
    title="PyTorch's checkpoint wrapper",
    keep=55,
    keep_sharded=100,
    why_keep="it is around the layer itself, whatever calls the layer",
    remove="delete the apply_activation_checkpointing(…) or checkpoint_wrapper(…) call",
    docs="https://docs.pytorch.org/docs/stable/fsdp.html",
    checked="ran here (torch 2.13.0)",
    variants=("torch < 2.2: reentrant", "torch >= 2.2: non-reentrant"),
    asks=("torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py:*",),
    edits=(Edit("apply_activation_checkpointing", "delete"), Edit("checkpoint_wrapper", "unwrap")),
)
# A framework's configuration switches it on, inside the FSDP units.
CONFIGURED = replace(
    WRAPPER,
    keep=70,
    keep_sharded=110,
    caution="Check whether other jobs share the configuration.",
    edits=(),
)
APPLIED = replace(
    WRAPPER,
    fewer="let the check_fn of apply_activation_checkpointing refuse {layers}",
    selectively="pass context_fn={context} to checkpoint_wrapper",
    sharding="fsdp|fully_sharded",
    gathering=r"torch/distributed/(?:fsdp|checkpoint)/|/_shard/",
    engines=(("FullyShardedDataParallel", "FSDP"),),
)
# A recompute is part of the compiled backward graph, and never more than one.
COMPILER = Mechanism(
    name="compile-memory-budget",
    title="torch.compile's activation_memory_budget",
    keep=95,
    why_keep="the compiler recomputes what is cheapest, and fuses it with the backward",
    remove="set torch._functorch.config.activation_memory_budget = 1.0",
    docs="https://docs.pytorch.org/docs/stable/torch.compiler.html",
    checked="ran here (torch 2.13.0): the setting is noted, recomputes are inside compiled code",
    variants=("torch >= 2.4: neither; part of the compiled backward",),
    caution=(
        "It applies to every compiled function of the process. Below 1, gradients through dropout "
        "can be wrong (pytorch/pytorch issue 190758)."
    ),
)
COMPOSABLE = _of_torch(
    name="composable-checkpoint",
    title="PyTorch's composable checkpoint",
    keep=90,
    why_keep="it is non-reentrant and leaves the module's class and names as they are",
    remove="delete the checkpoint(module) call",
    variants=("non-reentrant only",),
    asks=("torch/distributed/_composable/checkpoint_activation.py:*",),
    edits=(Edit("checkpoint", "delete"), Edit("checkpoint", "unwrap")),
    fewer="do not apply checkpoint(module) to {layers}",
    selectively="checkpoint(module, context_fn={context})",
)
FIT = _of_torch(
    name="fit",
    title="recompute_scan.fit",
    keep=97,
    why_keep="it measured memory, and recomputes only what does not fit",
    remove="delete the recompute_scan.fit(…) call",
    variants=("non-reentrant only",),
    asks=("recompute_scan/fitting/layer_switch.py:*",),
    switches=("recompute_scan.fitting:fit",),
    edits=(Edit("fit", "delete"), Edit("fit", "unwrap")),
    fewer="give recompute_scan.fit(…) more memory, which then keeps {layers}",
    selectively="leave that to recompute_scan.fit(…), which tries it where it fits",
)
SEQUENTIAL = _of_torch(
    name="checkpoint-sequential",
    title="torch.utils.checkpoint.checkpoint_sequential",
    keep=40,
    why_keep="it checkpoints whole segments and is the code's own choice",
    remove="run the modules one after the other instead of through checkpoint_sequential(…)",
    variants=_VARIANTS,
    asks=(f"{CHECKPOINT_FILE}:checkpoint_sequential",),
)
SELECTIVE = _of_torch(
    name="selective-checkpoint",
    title="selective checkpointing (context_fn)",
    keep=95,
    why_keep="it saves what is expensive to compute and recomputes only the rest",
    remove="call the function itself: checkpoint(f, x, …) becomes f(x)",
    variants=("non-reentrant only; public since torch 2.5",),
    asks=ANYWHERE,
    selective=True,
    edits=(Edit("checkpoint", "call"),),
)
DIRECT = _of_torch(
    name="torch-checkpoint",
    title="torch.utils.checkpoint.checkpoint",
    keep=30,
    why_keep="the code itself chose what to checkpoint",
    remove="call the function itself: checkpoint(f, x, …) becomes f(x)",
    variants=_VARIANTS,
    asks=ANYWHERE,
    edits=(Edit("checkpoint", "call"),),
    fewer="call {layers} directly instead of through checkpoint(…)",
    selectively="checkpoint(…, use_reentrant=False, context_fn={context})",
    # Libraries keep their copies of the reentrant function in files of such a name.
    backward=r"checkpoint\w{0,80}\.py:backward$",
    commands=("torchrun",),
    launchers=("torch.distributed", "torch._inductor", "torch.multiprocessing"),
    engines=(("DistributedDataParallel", "DDP"),),
)
LIBRARY = _of_torch(
    name="library-checkpoint",
    title="a library's own checkpointing",
    keep=48,
    why_keep="the library chose what to checkpoint",
    remove="switch checkpointing off in the library, by an argument or a method of its model",
    checked="ran here (torch 2.13.0, a library made for the test)",
    variants=_VARIANTS,
    caution="It is not known which of its settings switches it on; the line shown is the call "
    "that led there.",
)
OWN = _of_torch(
    name="own-function",
    title="a checkpoint function of your own",
    keep=25,
    why_keep="the code itself chose what to checkpoint",
    remove="call the layer itself instead of the function's apply(…)",
    checked="ran here (torch 2.13.0, functions as in guided-diffusion, unsloth and Megatron)",
    variants=("its own; reentrant, as every autograd function that runs its forward again",),
    caution="Other work of the function, such as moving saved tensors to the host, goes too.",
)
MECHANISMS = (APPLIED, COMPILER, COMPOSABLE, FIT, SEQUENTIAL, SELECTIVE, DIRECT, LIBRARY, OWN)


def signatures() -> tuple[Signature, ...]:
    """Failures before torch's own function runs, and of copies of guided-diffusion's."""
    return (
        Signature(
            code="RS131",
            cause_name="not-imported",
            error="AttributeError",
            message=re.compile(r"^module 'torch\.utils' has no attribute 'checkpoint'"),
            title="The code uses torch.utils.checkpoint without importing it",
            cause="""In many versions, import torch alone does not import this module. The code
                works only where something else has imported it.""",
            fix="""Put `import torch.utils.checkpoint` into the file that the traceback ends in, or
                at the top of your script. If the file is a library's, upgrade it.""",
            sources=(
                "huggingface/transformers/issues/9617",
                "huggingface/transformers/issues/15422",
                "pytorch/pytorch/pull/148641",
            ),
        ),
        Signature(
            code="RS130",
            cause_name="frozen-argument",
            error="RuntimeError",
            message=re.compile(r"^One of the differentiated Tensors does not require grad"),
            where=_differentiates,
            title="A checkpoint function asked for the gradient of something frozen",
            cause="""The function's backward() asks torch.autograd.grad for every input and
                parameter that it was given, as guided-diffusion's and its copies do (latent
                diffusion, ControlNet). One of them is frozen, as with LoRA.""",
            fix="""Give the function only parameters that train
                (`[p for p in params if p.requires_grad]`), or switch it off (use_checkpoint:
                False). Or call torch's function: checkpoint(f, *inputs, use_reentrant=False).""",
            gradients=NON_REENTRANT,
            sources=("CompVis/stable-diffusion/issues/784", "cloneofsimo/lora/issues/253"),
        ),
        Signature(
            code="RS130",
            cause_name="used-up",
            error="AttributeError",
            message=re.compile(
                r"^'\w*Checkpoint\w*Backward' object has no attribute 'input_(?:tensors|params)'"
            ),
            title="A checkpoint function has already given away what it kept for its backward pass",
            cause="""Some functions, such as guided-diffusion's, delete their inputs in backward().
                A second backward pass through the same forward (retain_graph=True) finds none.""",
            fix="""Add the losses up and call backward once, or run the forward again. Or switch the
                function off: use_checkpoint=False.""",
            sources=("openai/guided-diffusion/pull/144",),
        ),
    )
