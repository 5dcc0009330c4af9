"""Failures of the recompute itself: what it saved is not what the original run saved."""

from __future__ import annotations

import re

from msgspec.structs import replace

from recompute_scan.diagnose import gradients, metadata
from recompute_scan.diagnose.signature import Signature, doing, some

_TORCH = "https://github.com/pytorch/pytorch/issues/"
_HF = "https://github.com/huggingface/transformers/issues/"

_MISMATCH = Signature(
    code="RS101",
    name="checkpoint-metadata-mismatch",
    cause_name="unknown",
    error="CheckpointError",
    message=re.compile(r"have different metadata than during the forward pass"),
    title="A checkpointed block saved other tensors in its recompute than in its first run",
    cause=(
        "The block does not do the same thing twice: something that it reads changed between "
        "the forward pass and the recompute (a cache, a counter, a context, a random choice)."
    ),
    fix=(
        "Find what the block reads beside its inputs: run once under "
        "torch.utils.checkpoint.set_checkpoint_debug_enabled(True), which lists the operators of "
        "both runs. Do not switch to the reentrant variant: it only skips the check."
    ),
    versions="torch 2.1 and later, non-reentrant checkpoints.",
    sources=("https://docs.pytorch.org/docs/stable/checkpoint.html",),
    checked="reproduced",
)

_GROWING_CACHE_MORE = """\
```diff
 model = LlamaForCausalLM.from_pretrained(name)
+model.config.use_cache = False
 strategy = FSDPStrategy(activation_checkpointing_policy={LlamaDecoderLayer})
```

The sign is that keys and values are exactly twice as long in the recompute, and nothing else is:
`[1, 25, 32, 128]` saved, `[1, 50, 32, 128]` recomputed, or scores `[8, 8]` saved and `[8, 16]`
recomputed. A row count that doubles (`[1, 5120]`, then `[2, 5120]`) is another fault.

Two changes that people make instead, and why not to:

- *The reentrant variant.* It does not compare what it recomputes. The layer runs again over
  a cache that holds every key twice, and the gradients are wrong; nothing says so.
- *The model's own switch on top*, `gradient_checkpointing_enable(...)`. It works, because that
  switch turns the cache off. The strategy's policy still stands, though, so that each layer now
  has two checkpoints, and with a reentrant one among them runs twice in the backward pass:
  [RS001](RS001.md). If you do prefer the model's switch, take the policy out.
"""

_GROWING_CACHE = replace(
    _MISMATCH,
    cause_name="kv-cache",
    fits=metadata.grew_twofold,
    title="The key-value cache grew a second time while a checkpointed layer was recomputed",
    cause=(
        "A checkpoint wrapper (FSDP's policy, for instance) recomputes decoder layers while the "
        "model's key-value cache is on. The recompute appends its keys and values to the cache "
        "that the forward pass had already filled, so they come out twice as long. The model's "
        "own gradient_checkpointing_enable() would have turned the cache off; a wrapper does not."
    ),
    fix=(
        "Train with use_cache=False (in model.config), and keep the wrapper as it is. Do "
        "not switch the wrapper to the reentrant variant: that skips torch's check, and training "
        "goes on with wrong gradients. Do not add gradient_checkpointing_enable() to the wrapper "
        "either: it does turn the cache off, but then every layer is recomputed twice (RS001)."
    ),
    more=_GROWING_CACHE_MORE,
    keep="the checkpoint wrapper or policy, non-reentrant",
    remove="the key-value cache during training: use_cache=False",
    versions=(
        "transformers up to 4.57 with sdpa attention, and 5.23 with eager attention (RS110), "
        "torch 2.1 and later."
    ),
    sources=(
        "https://github.com/Lightning-AI/pytorch-lightning/issues/19267",
        f"{_HF}34928",
        f"{_TORCH}155171",
    ),
)

_OTHER_MISMATCHES = (
    replace(
        _MISMATCH,
        cause_name="zero3-frozen",
        fits=metadata.came_back_empty,
        title="Frozen parameters were given back before their layer was recomputed (ZeRO-3)",
        cause=(
            "Under DeepSpeed ZeRO-3, a frozen parameter is partitioned again when its layer's "
            "forward ends, and the recompute then saves its empty placeholder, of shape [0]. LoRA "
            "on ZeRO-3 is the usual case."
        ),
        fix=(
            "Take a DeepSpeed with the fix. Before it, pass "
            "gradient_checkpointing_kwargs={'use_reentrant': True} together with "
            "use_cache=False and enable_input_require_grads(), or use ZeRO-2: here the tensors "
            "are the same ones and only the placeholder differs."
        ),
        gradients=gradients.REENTRANT,
        versions="DeepSpeed before 0.19.3 (pull request 8148), as far as its thread tells.",
        sources=(
            f"{_HF}47254",
            "https://github.com/deepspeedai/DeepSpeed/pull/8148",
            "https://github.com/huggingface/trl/issues/2514",
        ),
        checked="message",
    ),
    replace(
        _MISMATCH,
        cause_name="sequence-parallel",
        fits=metadata.shrank_evenly,
        title="The recompute saw a shorter sequence: it ran outside the context-parallel region",
        cause=(
            "Context or sequence parallelism splits the sequence inside a context manager. The "
            "recompute runs in the backward pass, and where that is outside the context, lengths "
            "differ by the number of ranks."
        ),
        fix=(
            "Put loss.backward() inside the same context as the forward pass, or checkpoint "
            "inside the region instead of around it."
        ),
        versions="Not tied to a version.",
        sources=("https://github.com/huggingface/trl/issues/4314",),
        checked="message",
    ),
    replace(
        _MISMATCH,
        cause_name="mixed-precision",
        fits=metadata.only_dtypes_differ,
        title="The recompute ran in another precision than the original",
        cause=(
            "Shapes agree and dtypes do not. Either FSDP2's mixed precision did not cast the "
            "inputs of the recompute, or the recompute ran under another autocast state than the "
            "forward pass."
        ),
        fix=(
            "With FSDP2, take torch 2.13 or put the checkpoint wrapper on before fully_shard. "
            "Otherwise run the forward pass, and whatever computes with the same weights before "
            "it, under one torch.autocast."
        ),
        versions="FSDP2 with a model's own checkpointing: torch 2.11 and 2.12.",
        sources=("https://github.com/NVIDIA-NeMo/Automodel/pull/3513", f"{_TORCH}141896"),
        checked="message",
    ),
    replace(
        _MISMATCH,
        cause_name="expert-routing",
        fits=metadata.rows_moved,
        title="The recompute sent some tokens to other experts than the original",
        cause=(
            "In a mixture of experts, the router is computed again in the recompute. Ties, noise "
            "or a non-deterministic dispatch move a few rows from one expert to another."
        ),
        fix=(
            "Keep the router's choice instead of computing it again: leave the router out of the "
            "checkpoint, or save its output and the top-k with a selective checkpoint."
        ),
        versions="Not tied to a version; NeMo leaves the router out by default since 2026.",
        sources=(f"{_TORCH}171355", "https://github.com/pytorch/torchtitan/issues/1117"),
        checked="message",
    ),
)

_COUNT = Signature(
    code="RS102",
    name="checkpoint-tensor-count",
    cause_name="impure-block",
    error="CheckpointError",
    message=re.compile(
        r"A different number of tensors was saved|trying to save more tensors during recomputation"
    ),
    title="A checkpointed block saved another number of tensors in its recompute",
    cause=(
        "The block took another way through its code the second time: a branch on data or on a "
        "counter, a list argument that it empties, an operator whose forward is called directly "
        "instead of through apply(), another graph of torch.compile."
    ),
    fix=(
        "Make the block depend on its inputs alone. "
        "torch.utils.checkpoint.set_checkpoint_debug_enabled(True) lists the operators of both "
        "runs side by side."
    ),
    versions="torch 2.1 and later, non-reentrant checkpoints.",
    sources=(
        "https://github.com/facebookresearch/xformers/issues/1126",
        "https://docs.pytorch.org/docs/stable/checkpoint.html",
    ),
    checked="reproduced",
)

# torch's own text points to torch.compile in every such error, so the frames must show it.
_COMPILED = r"torch/_(?:inductor|functorch)/|:compiled_fn$"


SIGNATURES = (
    _GROWING_CACHE,
    *_OTHER_MISMATCHES,
    _MISMATCH,
    replace(
        _COUNT,
        cause_name="compiled",
        where=some(_COMPILED),
        needs_frames=True,
        title="torch.compile chose another graph for the recompute than for the original run",
        cause=(
            "A compiled function inside a checkpoint has two valid graphs, and the cache of "
            "graphs answers with the other one in the recompute. They save different tensors."
        ),
        fix=(
            "Mark the dimension that varies with torch._dynamo.mark_dynamic, or (torch 2.10 and "
            "later) call torch._C._dynamo.eval_frame._set_lru_cache(False) before training. "
            "Compiling around the checkpoint instead of inside it also helps."
        ),
        versions="torch with torch.compile inside a checkpoint; open upstream.",
        sources=(f"{_TORCH}166926", "https://github.com/pytorch/torchtitan/issues/1991"),
        checked="message",
    ),
    _COUNT,
    Signature(
        code="RS103",
        name="checkpoint-unpacked-twice",
        cause_name="saved-tensors-read-twice",
        error="CheckpointError",
        message=re.compile(r"that was already\s+unpacked once"),
        title="A custom autograd function read its saved tensors twice",
        cause=(
            "Under a non-reentrant checkpoint, ctx.saved_tensors can be read once in a backward "
            "formula: the tensor is handed over and dropped. Some custom kernels read it again."
        ),
        fix=(
            "In the function's backward, read ctx.saved_tensors once into local names. Where it "
            "belongs to a library, take a newer version of that."
        ),
        versions="torch 2.1 and later; fixed library by library (Transformer Engine, mamba, stk).",
        sources=(
            "https://github.com/NVIDIA/TransformerEngine/pull/1334",
            "https://github.com/state-spaces/mamba/issues/909",
        ),
        checked="reproduced",
    ),
    Signature(
        code="RS110",
        name="cache-grown-in-recompute",
        cause_name="kv-cache",
        error="RuntimeError|ValueError",
        message=metadata.MASK,
        where=doing("recompute"),
        needs_frames=True,
        fits=lambda raised: metadata.keys_twice_the_mask(raised.message),
        title="The key-value cache grew a second time while a checkpointed layer was recomputed",
        cause=(
            "The same fault as RS101, met by the attention itself: the recompute appended to the "
            "key-value cache again, and the attention mask is only half as long as the keys."
        ),
        fix=(
            "Train with use_cache=False (in model.config), and keep the wrapper as it is. "
            "Do not switch to the reentrant variant or add gradient_checkpointing_enable() on top "
            "of a wrapper; RS101 says why."
        ),
        keep="the checkpoint wrapper or policy, non-reentrant",
        remove="the key-value cache during training: use_cache=False",
        versions="transformers with eager attention, 5.23 included.",
        sources=(
            "https://github.com/Lightning-AI/pytorch-lightning/issues/19267",
            f"{_HF}28056",
        ),
        checked="reproduced",
    ),
)
