"""Recomputes that fail, and checkpoint files that cannot be saved.

Failures of the recompute itself: what it saved is not what the original run saved.

Failures while saving.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from recompute_scan.crash import Raised
from recompute_scan.diagnose.log_lines import RECOMPILATION
from recompute_scan.diagnose.tracebacks import doing
from recompute_scan.frameworks import detect
from recompute_scan.frameworks.detect import Signature, innermost, some

_TORCH = "https://github.com/pytorch/pytorch/issues/"
_HF = "https://github.com/huggingface/transformers/issues/"

_MISMATCH = Signature(
    code="RS101",
    name="checkpoint-metadata-mismatch",
    cause_name="unknown",
    error="CheckpointError",
    message=detect.MISMATCH,
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
    fits=detect.grew_twofold,
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
        cause_name="sequence-parallel",
        fits=detect.shrank_evenly,
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
        fits=detect.only_dtypes_differ,
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
        fits=detect.rows_moved,
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

_LEFT_META = re.compile(
    rf"{detect.MISMATCH.pattern}|^Tensor on device \S+ is not on the expected device meta"
    r"|^Cannot copy out of meta tensor"
)
_RECOMPUTES = doing("recompute")


def _weights_gone(raised: Raised) -> bool:
    """Were there values in the forward pass, and is there a placeholder in the recompute?"""
    if detect.MISMATCH.search(raised.message):
        return detect.on_meta(raised)
    return _RECOMPUTES(raised.frames) is not None


_SHOWN = (
    replace(
        _MISMATCH,
        cause_name="weights-gone",
        error="CheckpointError|RuntimeError|NotImplementedError",
        message=_LEFT_META,
        fits=_weights_gone,
        title="Weights were taken away before their layer was recomputed",
        cause=(
            "A weight is a placeholder without values (on the device meta) in the recompute. What "
            "streams, offloads or swaps layers took it away when the layer's forward pass ended, "
            "and the recompute calls the layer in a way that does not bring it back."
        ),
        fix=(
            "Let the weights come back for the recompute: hooks that load them go inside of what "
            "is checkpointed, not around it. Otherwise keep checkpointed layers on the device, or "
            "leave checkpointing out where layers are streamed. Where offloading is a library's, "
            "take its newest version."
        ),
        versions="Not tied to a version.",
        sources=("https://github.com/MakazhanAlpamys/Soup/issues/328",),
    ),
    replace(
        _MISMATCH,
        cause_name="device",
        fits=detect.only_devices_differ,
        title="The recompute had tensors on another device than the original",
        cause=(
            "Shapes and dtypes agree, and devices do not. Either the block makes tensors on "
            "torch's default device, which a recompute in the backward pass does not have "
            "(torch.set_default_device, `with torch.device(...)`); or weights were moved in "
            "between, as offloading does."
        ),
        fix=(
            "Make tensors in the block on its input's device (torch.zeros(..., device=x.device)), "
            "and put loss.backward() inside the same `with torch.device(...)`. If weights are "
            "moved, bring them back before their layer's recompute."
        ),
        versions="Seen with torch 2.2.",
        sources=(f"{_TORCH}124788",),
        checked="message",
    ),
    replace(
        _MISMATCH,
        cause_name="attention-kernel",
        fits=detect.random_state_differs,
        title="The recompute's attention ran in another kernel than the original's",
        cause=(
            "The random state that one of them saved is flash attention's, and the other's is "
            "not. scaled_dot_product_attention chooses among its kernels at every call (cuDNN's, "
            "flash, memory-efficient), and they save different tensors."
        ),
        fix=(
            "Fix the choice for both: call attention under torch.nn.attention.sdpa_kernel([...]) "
            "inside the block, or turn one off for the whole run "
            "(torch.backends.cuda.enable_cudnn_sdp(False))."
        ),
        versions="torch 2.5 and later, where cuDNN's kernel may be chosen.",
        sources=("https://github.com/NVIDIA-NeMo/RL/pull/1676",),
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
_ANOTHER_GRAPH = (
    "Mark the dimension that varies with torch._dynamo.mark_dynamic, or (torch 2.10 and "
    "later) call torch._C._dynamo.eval_frame._set_lru_cache(False) before training. "
    "Compiling around the checkpoint instead of inside it also helps."
)

_UNSAVED = Signature(
    code="RS121",
    name="early-stop-assertion",
    cause_name="unsaved",
    error="AssertionError",
    message=re.compile(r"^Something went unexpectedly wrong in activation checkpoint"),
    title="torch looked for a tensor that the recompute should have saved, and did not find it",
    cause=(
        "The recompute took another way than the first run, which torch noticed late. Two such "
        "ways are known: an operator whose forward is called directly instead of through apply(), "
        "and a function that was compiled in the one and ran in another way in the other. The "
        "message does not tell which."
    ),
    fix=(
        "Run once without torch.compile (TORCH_COMPILE_DISABLE=1). If it fails still, look for "
        "a custom operator in the block, and call it through apply(); xformers was mended so."
    ),
    versions="torch 2.1 and later, non-reentrant checkpoints.",
    sources=(
        "https://github.com/facebookresearch/xformers/issues/1126",
        "https://github.com/unslothai/unsloth-zoo/issues/1146",
    ),
)


def _recompiled(known: Signature) -> Signature:
    """The same failure, where the log has a line of torch.compile's shortly before it."""
    return replace(
        known,
        cause_name="recompiled",
        beside=RECOMPILATION,
        title="torch.compile compiled a function anew shortly before the recompute failed",
        cause=(
            "The line of the log that is shown here says which function and why. Where that was in "
            "the recompute, the block ran another graph than in its forward pass, or ran without "
            "one once the limit of recompilations was met, and saved other tensors. Threads count "
            "as well: the recompute runs in one of autograd's, and torch's guards look at the "
            "number of threads and at what is switched on for a thread."
        ),
        fix=(
            "Look at the reason in that line, and make it the same in both runs. If the limit was "
            "met, raise torch._dynamo.config.recompile_limit (before torch 2.6 cache_size_limit). "
            f"{_ANOTHER_GRAPH}"
        ),
        versions="torch with torch.compile inside a checkpoint; open upstream.",
        sources=(
            "https://github.com/ecmwf/anemoi-core/issues/1330",
            "https://github.com/unslothai/unsloth-zoo/pull/1001",
            f"{_TORCH}166926",
        ),
        checked="message",
    )


SIGNATURES = (
    _GROWING_CACHE,
    *_OTHER_MISMATCHES,
    *_SHOWN,
    _recompiled(_MISMATCH),
    replace(
        _MISMATCH,
        cause_name="compiled",
        where=some(_COMPILED),
        needs_frames=True,
        title="A compiled function's recompute saved other tensors than its first run",
        cause=(
            "A compiled function inside the checkpoint asked for what it had saved, and its "
            "recompute had saved others. Mostly the cache of graphs answered with another graph; "
            "something that the block reads may also have changed."
        ),
        fix=_ANOTHER_GRAPH,
        versions="torch with torch.compile inside a checkpoint; open upstream.",
        sources=(f"{_TORCH}166926", "https://github.com/pytorch/torchtitan/issues/2771"),
        checked="message",
    ),
    _MISMATCH,
    _recompiled(_COUNT),
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
        fix=_ANOTHER_GRAPH,
        versions="torch with torch.compile inside a checkpoint; open upstream.",
        sources=(f"{_TORCH}166926", "https://github.com/pytorch/torchtitan/issues/1991"),
        checked="message",
    ),
    _COUNT,
    _recompiled(_UNSAVED),
    _UNSAVED,
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
        message=detect.MASK,
        where=doing("recompute"),
        needs_frames=True,
        fits=lambda raised: detect.keys_twice_the_mask(raised.message),
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


_OPTIMIZER_STATE = r"_optim_utils\.py:|:_?optim_state_dict$|:get_state_dict$"

SAVING_SIGNATURES = (
    Signature(
        code="RS202",
        name="optimizer-state-dtype-mismatch",
        cause_name="assertion",
        error="AssertionError",
        message=re.compile(r"^(?:Expected dtype == info\.dtype, got .*)?$", re.DOTALL),
        where=innermost(r"_optim_utils\.py:_convert_all_state_info$"),
        needs_frames=True,
        title="FSDP cannot gather optimizer state of different dtypes",
        cause=(
            "State tensors of one kind have different dtypes, on different ranks or for "
            "different pieces of one flat parameter. Optimizers with 8-bit or 16-bit state, and "
            "an optimizer built before FSDP changed the parameters, do so."
        ),
        fix=(
            "Cast the state to float32 before saving (never down: the optimizer goes on with it); "
            "build the optimizer after wrapping, on float32 parameters; no 8-bit optimizer with "
            "FSDP1's gathered state."
        ),
        versions="FSDP1. The assertion has no text up to torch 2.9.",
        sources=(
            "https://github.com/hiyouga/EasyR1/issues/226",
            f"{_TORCH}156166",
            "https://github.com/unslothai/unsloth/issues/2767",
        ),
        checked="reproduced",
    ),
    Signature(
        code="RS202",
        name="optimizer-state-dtype-mismatch",
        cause_name="gather",
        error="RuntimeError|TypeError|ValueError|DistBackendError",
        message=re.compile(r"output tensor must have the same type as input tensor"),
        where=some(_OPTIMIZER_STATE),
        needs_frames=True,
        title="FSDP cannot gather optimizer state of different dtypes",
        cause=(
            "The gathering collective was given a piece of state of another dtype than it had "
            "made room for: exp_avg and exp_avg_sq differ, or the ranks do."
        ),
        fix=(
            "Cast the state to float32 before saving (never down: the optimizer goes on with it); "
            "build the optimizer after wrapping, on float32 parameters; no 8-bit optimizer with "
            "FSDP1's gathered state."
        ),
        versions="FSDP1 on NCCL.",
        sources=("https://github.com/hiyouga/EasyR1/issues/226", f"{_TORCH}112717"),
    ),
    Signature(
        code="RS203",
        name="sharded-padding-assert",
        cause_name="padding",
        error="AssertionError",
        message=re.compile(r"Manually calculated _sharded_numel_padded is incorrect"),
        title="FSDP's pieces of optimizer state do not add up to its shard",
        cause=(
            "A parameter counts as trainable and has no optimizer state: typically a vision "
            "tower that was frozen around or after the wrapping. The exact condition is narrower "
            "than that; we could not make it happen with torch 2.9 and 2.13."
        ),
        fix=(
            "Freeze before wrapping, wrap the frozen tower as an FSDP unit of its own, pass "
            "use_orig_params=True, and StateDictOptions(strict=False) when saving. That leaves out "
            "what does not fit and says nothing: look that the state of all that trains is there."
        ),
        versions="The message exists from torch 2.2 on; EasyR1 changed its own code in April 2025.",
        sources=(
            "https://github.com/hiyouga/EasyR1/issues/226",
            "https://github.com/hiyouga/EasyR1/issues/244",
        ),
    ),
    Signature(
        code="RS205",
        name="optimizer-lacks-parameter",
        cause_name="subset",
        error="RuntimeError",
        message=re.compile(r"is not in the optimizer state\. The FSDPParamInfo has the param keys"),
        title="The optimizer does not hold every trainable parameter of an FSDP unit",
        cause=(
            "The optimizer was given some parameters of a unit only, or requires_grad was "
            "changed after it was built."
        ),
        fix=(
            "Set requires_grad=False, before wrapping, for what is not to be trained, or wrap it "
            "in units of its own; give the optimizer all the rest. Build it anew after "
            "(un)freezing, which begins its state anew."
        ),
        versions="FSDP1; seen with torch 2.13.",
        sources=("https://docs.pytorch.org/docs/stable/fsdp.html",),
        checked="reproduced",
    ),
)
