"""Recomputes that save other tensors than the first run, and checkpoint files not saved."""

from __future__ import annotations

import re

from msgspec.structs import replace

from recompute_scan.crash import Raised
from recompute_scan.diagnose.log_lines import RECOMPILATION
from recompute_scan.diagnose.tracebacks import doing
from recompute_scan.frameworks.base import CHECKPOINT_DOCS
from recompute_scan.frameworks.detect import (
    MISMATCH,
    Fits,
    Mismatch,
    Signature,
    all_tensors,
    any_tensor,
    innermost,
    mismatches,
    some,
)

_TORCH = "pytorch/pytorch/issues/"
_HF = "huggingface/transformers/issues/"

_KEY_DIMENSIONS = 4
_SEQUENCE_DIMENSIONS = 3
_TABLE_DIMENSIONS = 2
# Attention's complaints about a mask that does not fit the keys: where it is added to scores, where
# transformers checks before that, and where torch's own attention expands it.
_MASK = re.compile(
    r"^The size of tensor a \((?P<a>\d{1,18})\) must match the size of tensor b \((?P<b>\d{1,18})\)"
    r"|^Attention mask should be of size \([\d, ]*?(?P<wanted>\d{1,18})\), but is "
    r"(?:torch\.Size\(\[)?[\d, (]*?(?P<given>\d{1,18})[\])]"
    r"|^The expanded size of the tensor \((?P<target>\d{1,18})\) must match the existing size "
    r"\((?P<existing>\d{1,18})\)"
)
# Rows that another routing of tokens moves at most, between these experts and to other ranks.
_FEW_ROWS, _FEW_ROWS_AWAY = 0.2, 0.01
# A mixture of experts in the name of a file, function or line.
_EXPERTS = re.compile(r"(?<![a-z])(?:moe|mixtral|experts?|routers?|top_?k)(?![a-z])", re.IGNORECASE)


def _grew_twofold(raised: Raised) -> bool:
    """Keys and values are twice as long in the recompute, and nothing else is.

    Every tensor differs in one dimension, which doubled and was as long in all: the sequence.
    Either some tensor is a square of scores, and its keys alone doubled, or all have the four
    dimensions of keys and values, and neither the batch nor the width changed.
    """
    found = [(one, one.changed()) for one in mismatches(raised.message)]
    if not found or any(len(change) != 1 or not one.same_dtype for one, change in found):
        return False
    grown = [(one, change[0]) for one, change in found]
    lengths = {one.saved[at] for one, at in grown}
    if len(lengths) > 1 or any(one.recomputed[at] != 2 * one.saved[at] for one, at in grown):
        return False
    scores = any(
        one.saved[-1] == one.saved[-2] and at == len(one.saved) - 1
        for one, at in grown
        if len(one.saved) > 2
    )
    return scores or all(len(one.saved) == _KEY_DIMENSIONS and at != 0 for one, at in grown)


def _shrank_evenly(raised: Raised) -> bool:
    """Of every tensor the sequence is shorter in the recompute, by the same whole number of times.

    The sequence is the longest dimension but the width, of a tensor that has a batch before it.
    """
    ratios = {_shortened(one) for one in mismatches(raised.message)}
    return len(ratios) == 1 and None not in ratios


def _shortened(one: Mismatch) -> int | None:
    if len(one.saved) < _SEQUENCE_DIMENSIONS or not one.same_dtype:
        return None
    inner = one.saved[1:-1]
    at = 1 + inner.index(max(inner))
    if one.changed() != [at]:
        return None
    old, new = one.saved[at], one.recomputed[at]
    return old // new if new > 1 and old > new and old % new == 0 else None


_only_dtypes_differ = all_tensors(
    lambda one: (
        one.same_shape
        and not one.same_dtype
        and "float" in one.saved_dtype
        and "float" in one.recomputed_dtype
    )
)


def _only_devices_differ(raised: Raised) -> bool:
    """Shapes and dtypes are equal, devices are not.

    A random state alone does not count: attention saves its own, in whole numbers.
    """
    found = mismatches(raised.message)
    return any("int" not in one.saved_dtype for one in found) and all(
        one.same_shape and one.same_dtype and one.saved_device != one.recomputed_device
        for one in found
    )


# An operator's complaints about types, which passed in the first run.
_TYPES = re.compile(
    r"^expected (?:scalar type \w+ but found|m(?:at)?1 and m(?:at)?2 to have the same dtype)"
    r"|^\w+ and mat2 must have the same dtype|^Expected query, key, and value to have the same "
    r"|^Input type \([\w.]+\) and (?:weight|bias) type \([\w.]+\) should be the same"
)
_RECOMPUTES = doing("recompute")


def _shown_or_refused(fits: Fits) -> Fits:
    """Does the message show it, or does an operator of the recompute refuse its tensors?"""
    return lambda raised: (
        fits(raised) if MISMATCH.search(raised.message) else _RECOMPUTES(raised.frames) is not None
    )


# A tensor that had values when it was saved is on ``meta`` in the recompute.
_on_meta = any_tensor(
    lambda one: one.recomputed_device == "meta" and one.saved_device not in ("meta", "")
)

# Only one of both kernels saved a random state of flash attention. Fused attention saves its seed
# and offset: flash attention as ``uint64``, the seed as two numbers; cuDNN's and the
# memory-efficient kernel as one ``int64`` each.
_random_state_differs = any_tensor(
    lambda one: (
        ("uint64" in one.saved_dtype) != ("uint64" in one.recomputed_dtype)
        and one.saved in ((), (2,))
        and one.recomputed in ((), (2,))
    )
)


def _rows_moved(raised: Raised) -> bool:
    """Only the rows of tables differ, by a few: tokens went to other experts.

    Some tables grow and some shrink: one expert gets the rows that another goes without. Where all
    grow, or all shrink, the others may be on other ranks; then few rows in a hundred moved, and
    the stack must show a mixture of experts, as any block may take another row.
    """
    found = mismatches(raised.message)
    if not _rows_differ(raised):
        return False
    both = len({one.recomputed[:1] > one.saved[:1] for one in found}) > 1
    share = _FEW_ROWS if both else _FEW_ROWS_AWAY
    shown = both or any(_EXPERTS.search(f"{one.site} {one.source or ''}") for one in raised.frames)
    return shown and all(
        abs(one.saved[0] - one.recomputed[0]) <= max(1, share * one.saved[0]) for one in found
    )


def _rows_differ(raised: Raised) -> bool:
    """Only the number of rows differs, of tables and of lists, and by no large share."""
    found = mismatches(raised.message)
    return bool(found) and all(
        0 < len(one.saved) == len(one.recomputed) <= _TABLE_DIMENSIONS
        and one.changed() == [0]
        and abs(one.saved[0] - one.recomputed[0]) <= max(1, _FEW_ROWS * one.saved[0])
        for one in found
    )


def _keys_twice_the_mask(message: str) -> bool:
    """Is the attention mask half as long as the keys, in any of the forms of ``_MASK``?

    transformers 4.40 makes the mask one longer than the sequence: 26 for 25, where the recompute's
    keys are 50.
    """
    match = _MASK.search(message)
    if match is None:
        return False
    keys, mask = next(
        (int(match[keys]), int(match[mask]))
        for keys, mask in (("a", "b"), ("wanted", "given"), ("target", "existing"))
        if match[keys] is not None
    )
    return mask > 1 and keys in (2 * mask, 2 * mask - 1, 2 * mask - 2)


_MISMATCH = Signature(
    code="RS101",
    cause_name="unknown",
    error="CheckpointError",
    message=MISMATCH,
    title="A checkpointed block saved different tensors in its recompute than in its forward",
    cause="""Something that the block reads changed between forward and recompute: a cache, a
        counter, a context or a random choice.""",
    fix="""Run once under torch.utils.checkpoint.set_checkpoint_debug_enabled(True), which lists
        the operators of both runs, and remove the difference. Do not switch to the reentrant
        variant: it only skips the check.""",
    versions="torch 2.1 and later, non-reentrant checkpoints.",
    sources=(CHECKPOINT_DOCS,),
    checked="reproduced",
)

_GROWING_CACHE_MORE = """\
```diff
 model = LlamaForCausalLM.from_pretrained(name)
+model.config.use_cache = False
 strategy = FSDPStrategy(activation_checkpointing_policy={LlamaDecoderLayer})
```
"""

_GROWING_CACHE = replace(
    _MISMATCH,
    cause_name="kv-cache",
    fits=_grew_twofold,
    title="The key-value cache grew a second time while a checkpointed layer was recomputed",
    cause="""A checkpoint wrapper, such as FSDP's policy, recomputes decoder layers while the
        key-value cache is on. The recompute appends to the filled cache, so keys and values come
        out twice as long.""",
    fix="""Train with use_cache=False in model.config, and keep the wrapper. Do not switch the
        wrapper to the reentrant variant: it skips torch's check and trains with wrong gradients.
        Do not add gradient_checkpointing_enable(): it turns the cache off, but every layer is then
        recomputed twice (RS001).""",
    more=_GROWING_CACHE_MORE,
    keep="the checkpoint wrapper or policy, non-reentrant",
    remove="the key-value cache during training: use_cache=False",
    versions="""transformers up to 4.57 with sdpa attention, and 5.23 with eager attention (an error
        of RS110), torch 2.1 and later.""",
    sources=("Lightning-AI/pytorch-lightning/issues/19267", f"{_HF}34928", f"{_TORCH}155171"),
)

_LEFT_META = re.compile(
    rf"{MISMATCH.pattern}|^Tensor on device \S+ is not on the expected device meta"
    r"|^Cannot copy out of meta tensor"
)

# Known from messages alone.
_READ = replace(_MISMATCH, checked="message")
_OTHER_MISMATCHES = (
    replace(
        _READ,
        cause_name="sequence-parallel",
        fits=_shrank_evenly,
        title="The recompute saw a shorter sequence: it ran outside the context-parallel region",
        cause="""Context or sequence parallelism splits the sequence inside a context manager, and
            the recompute runs outside it. The lengths' ratio is the rank count.""",
        fix="""Call loss.backward() inside the same context as the forward pass, or checkpoint
            inside the region.""",
        versions="Not tied to a version.",
        sources=("huggingface/trl/issues/4314",),
    ),
    replace(
        _READ,
        cause_name="mixed-precision",
        error="CheckpointError|RuntimeError",
        message=re.compile(f"{MISMATCH.pattern}|{_TYPES.pattern}"),
        fits=_shown_or_refused(_only_dtypes_differ),
        title="The recompute ran in another precision than the original",
        cause="""FSDP2's mixed precision did not cast the recompute's inputs, or forward and
            recompute ran under different autocast states: a library's checkpoint function may not
            restore it.""",
        fix="""With FSDP2, upgrade to torch 2.13 or apply the checkpoint wrapper before
            fully_shard. Otherwise enter torch.autocast inside the checkpointed block.""",
        versions="FSDP2 with a model's own checkpointing: torch 2.11 and 2.12.",
        sources=(
            "NVIDIA-NeMo/Automodel/pull/3513",
            f"{_TORCH}141896",
            "NVIDIA/TransformerEngine/issues/787",
        ),
    ),
    replace(
        _READ,
        cause_name="expert-routing",
        fits=_rows_moved,
        title="The recompute sent some tokens to other experts than the original",
        cause="""The recompute runs the router of the mixture of experts again. Ties, noise or a
            non-deterministic dispatch move a few rows to another expert.""",
        fix="""Leave the router out of the checkpoint, or save its output and the top-k with a
            selective checkpoint.""",
        versions="Not tied to a version; NeMo leaves the router out by default since 2026.",
        sources=(f"{_TORCH}171355", "pytorch/torchtitan/issues/1117"),
    ),
    replace(
        _MISMATCH,
        cause_name="weights-gone",
        error="CheckpointError|RuntimeError|NotImplementedError",
        message=_LEFT_META,
        fits=_shown_or_refused(_on_meta),
        title="Weights were taken away before their layer was recomputed",
        cause="""In the recompute a weight is a placeholder on the meta device. Streaming,
            offloading or swapping moved it after the forward pass, and the
            recompute does not load it again.""",
        fix="""Put the hooks that load weights inside the checkpointed module. Or keep checkpointed
            layers on the device, or do not checkpoint streamed layers. If a library offloads,
            upgrade it.""",
        versions="Not tied to a version.",
        sources=("MakazhanAlpamys/Soup/issues/328",),
    ),
    replace(
        _READ,
        cause_name="device",
        fits=_only_devices_differ,
        title="The recompute had tensors on another device than the original",
        cause="""Shapes and dtypes agree and devices differ. The block makes tensors on torch's
            default device, which the backward pass does not have (torch.set_default_device, `with
            torch.device(...)`), or offloading moved weights in between.""",
        fix="""Make tensors on the input's device (torch.zeros(..., device=x.device)), and call
            loss.backward() inside the same `with torch.device(...)`. Bring moved weights back
            before the recompute.""",
        versions="Seen with torch 2.2.",
        sources=(f"{_TORCH}124788",),
    ),
    replace(
        _READ,
        cause_name="attention-kernel",
        fits=_random_state_differs,
        title="The recompute's attention used a different kernel than the forward's",
        cause="""Only one of the two saved flash attention's random state.
            scaled_dot_product_attention chooses a kernel at every call (cuDNN, flash,
            memory-efficient), and each saves other tensors.""",
        fix="""Call attention under torch.nn.attention.sdpa_kernel([...]) inside the block, or turn
            one kernel off (torch.backends.cuda.enable_cudnn_sdp(False)).""",
        versions="torch 2.5 and later, where cuDNN's kernel may be chosen.",
        sources=("NVIDIA-NeMo/RL/pull/1676",),
    ),
)

_ROWS = replace(
    _READ,
    cause_name="rows",
    fits=_rows_differ,
    unsure=True,
    title="The recompute had more or fewer rows than the original",
    cause="""If the block is a mixture of experts, the recompute's router or dispatch handed out
        tokens anew. HybridEP's dispatch does so even where the router's choice is kept. Without
        experts, something else chose other rows.""",
    fix="""With experts, leave the router out of the checkpoint or keep its choice (NeMo:
        ignore_router_for_ac=True). If rows still differ, leave the dispatch out too. Without
        experts, run once under torch.utils.checkpoint.set_checkpoint_debug_enabled(True).""",
    versions="Not tied to a version; HybridEP: reported in August 2026.",
    sources=("NVIDIA-NeMo/Automodel/pull/3743", "NVIDIA-NeMo/Automodel/pull/2635"),
)

_COUNT = Signature(
    code="RS102",
    cause_name="impure-block",
    error="CheckpointError|RuntimeError",
    several=True,
    message=re.compile(
        r"A different number of tensors was saved|trying to save more tensors during recomputation"
    ),
    title="A checkpointed block saved a different number of tensors in its recompute",
    cause="""The block took another path the second time. Known reasons: something in force during
        the forward alone (hooks, a patched function, swapped parameters, a context manager,
        thread-local state), a branch on data or a counter, a list argument that it empties, an
        autograd function's forward() called directly, another compiled graph.""",
    fix="""A step inside `with torch.utils.checkpoint.set_checkpoint_debug_enabled(True):` lists the
        operators of both runs. Make the block depend on its inputs alone. Keep hooks and contexts
        until backward() returns, or enter contexts again by context_fn. Patch before the first
        step.""",
    versions="torch 2.1 and later, non-reentrant checkpoints.",
    sources=("facebookresearch/xformers/issues/1126", CHECKPOINT_DOCS),
    checked="reproduced",
)

# torch's own text points to torch.compile in every such error, so the frames must show it.
_COMPILED = r"torch/_(?:inductor|functorch)/|:compiled_fn$"
_ANOTHER_GRAPH = (
    "Mark the varying dimension with torch._dynamo.mark_dynamic, or (torch 2.10 and later) call "
    "torch._C._dynamo.eval_frame._set_lru_cache(False) before training. Or compile around the "
    "checkpoint."
)

_UNSAVED = Signature(
    code="RS121",
    cause_name="unsaved",
    message=re.compile(r"^Something went unexpectedly wrong in activation checkpoint"),
    title="torch looked for a tensor that the recompute should have saved, and did not find it",
    cause="""The recompute took another path than the first run. Known causes: a custom operator's
        forward() called instead of apply(), and a function that was compiled in one of the runs
        only.""",
    fix="""Run without torch.compile (TORCH_COMPILE_DISABLE=1). If that works, compile around the
        checkpoint; else call custom operators through apply().""",
    versions="torch 2.1 and later, non-reentrant checkpoints.",
    sources=("facebookresearch/xformers/issues/1126", "unslothai/unsloth-zoo/issues/1146"),
)


def _recompiled(known: Signature) -> Signature:
    """The same failure, where the log has a line of torch.compile's shortly before it."""
    return replace(
        known,
        cause_name="recompiled",
        nearby=RECOMPILATION,
        title="torch.compile recompiled a function shortly before the recompute failed",
        cause="""torch.compile's log line names function and reason. The recompute ran another
            graph, or, past the recompile limit, none.""",
        fix=(
            "Remove the reason that the log line names. If the limit was reached, raise "
            "torch._dynamo.config.recompile_limit (before torch 2.6 cache_size_limit). "
            f"{_ANOTHER_GRAPH}"
        ),
        versions="torch with torch.compile inside a checkpoint; open upstream.",
        sources=(
            "ecmwf/anemoi-core/issues/1330",
            "unslothai/unsloth-zoo/pull/1001",
            f"{_TORCH}166926",
        ),
        checked="message",
    )


def _compiled(known: Signature, title: str, cause: str, source: str) -> Signature:
    """The same failure in a compiled function."""
    return replace(
        known,
        cause_name="compiled",
        where=some(_COMPILED),
        title=title,
        cause=cause,
        fix=_ANOTHER_GRAPH,
        versions="torch with torch.compile inside a checkpoint; open upstream.",
        sources=(f"{_TORCH}166926", source),
        checked="message",
    )


SIGNATURES = (
    _GROWING_CACHE,
    *_OTHER_MISMATCHES,
    _recompiled(_MISMATCH),
    _compiled(
        _MISMATCH,
        "A compiled function's recompute saved other tensors than its first run",
        """A compiled function inside the checkpoint saved other tensors in its recompute. Mostly
            the graph cache returned another graph; an input of the block may also have changed.""",
        "pytorch/torchtitan/issues/2771",
    ),
    _ROWS,
    replace(_MISMATCH, several=True),
    _recompiled(_COUNT),
    _compiled(
        _COUNT,
        "torch.compile chose another graph for the recompute than for the original run",
        """A compiled function inside the checkpoint has two valid graphs. In the recompute the
            graph cache returns the other one, which saves other tensors.""",
        "pytorch/torchtitan/issues/1991",
    ),
    _COUNT,
    _recompiled(_UNSAVED),
    _UNSAVED,
    Signature(
        code="RS103",
        cause_name="old-torch",
        error="RuntimeError",
        message=re.compile(r"^Attempt to retrieve a tensor saved by autograd multiple times"),
        title="An old torch lost a tensor that a checkpointed block had saved",
        cause="""Before 2.1, the non-reentrant variant hands each saved tensor out once, and loses
            some. Reported: a function that reads ctx.saved_tensors twice, or saves a tensor that is
            neither input nor output (flash-attn 2.0), or a second backward pass.""",
        fix="Upgrade to torch 2.1 or newer, where the variant was written anew.",
        versions="torch 1.11 to 2.0.",
        sources=(f"{_TORCH}103726", "Dao-AILab/flash-attention/issues/341", f"{_TORCH}82482"),
    ),
    Signature(
        code="RS103",
        cause_name="saved-tensors-read-twice",
        message=re.compile(r"that was already\s+unpacked once"),
        title="A custom autograd function read its saved tensors twice",
        cause="""Under a non-reentrant checkpoint, a backward formula can read ctx.saved_tensors
            only once: the tensors are then dropped.""",
        fix="Read ctx.saved_tensors once into local names, or upgrade the library.",
        versions="torch 2.1 and later; fixed library by library (Transformer Engine, mamba, stk).",
        sources=("NVIDIA/TransformerEngine/pull/1334", "state-spaces/mamba/issues/909"),
        checked="reproduced",
    ),
    Signature(
        code="RS110",
        cause_name="kv-cache",
        error="RuntimeError|ValueError",
        message=_MASK,
        where=doing("recompute"),
        fits=lambda raised: _keys_twice_the_mask(raised.message),
        title="The key-value cache grew a second time while a checkpointed layer was recomputed",
        cause="""The recompute appended to the key-value cache, as in RS101. Attention then fails,
            because the mask is half as long as the keys.""",
        fix="""Train with model.config.use_cache=False, and keep the checkpoint wrapper. Do not
            switch to the reentrant variant or add gradient_checkpointing_enable(): see RS101.""",
        keep="the checkpoint wrapper or policy, non-reentrant",
        remove="the key-value cache during training: use_cache=False",
        versions="transformers with eager attention, 5.23 included.",
        sources=("Lightning-AI/pytorch-lightning/issues/19267", f"{_HF}28056"),
        checked="reproduced",
    ),
)

_OPTIMIZER_STATE = r"_optim_utils\.py:|:_?optim_state_dict$|:get_state_dict$"

_STATE_DTYPES = Signature(
    code="RS202",
    cause_name="assertion",
    error="AssertionError",
    message=re.compile(r"^(?:Expected dtype == info\.dtype, got .*)?$", re.DOTALL),
    where=innermost(r"_optim_utils\.py:_convert_all_state_info$"),
    title="FSDP cannot gather optimizer state of different dtypes",
    cause="""State tensors of one kind have different dtypes on different ranks or for
        different pieces of a flat parameter. Causes: an optimizer with 8-bit or 16-bit state,
        or one built before FSDP changed the parameters.""",
    fix="""Build the optimizer after wrapping, on float32 parameters. Cast the state up to
        float32 before saving, never down. Do not gather 8-bit state with FSDP1.""",
    versions="FSDP1. The assertion has no text up to torch 2.9.",
    sources=("hiyouga/EasyR1/issues/226", f"{_TORCH}156166", "unslothai/unsloth/issues/2767"),
    checked="reproduced",
)

SAVING_SIGNATURES = (
    _STATE_DTYPES,
    replace(
        _STATE_DTYPES,
        cause_name="gather",
        error="RuntimeError|TypeError|ValueError|DistBackendError",
        message=re.compile(r"output tensor must have the same type as input tensor"),
        where=some(_OPTIMIZER_STATE),
        cause="""The gathering collective got a piece of state of another dtype than its buffer:
            exp_avg and exp_avg_sq differ, or the ranks do.""",
        versions="FSDP1 on NCCL.",
        sources=("hiyouga/EasyR1/issues/226", f"{_TORCH}112717"),
        checked="message",
    ),
    Signature(
        code="RS203",
        cause_name="padding",
        message=re.compile(r"Manually calculated _sharded_numel_padded is incorrect"),
        title="FSDP's pieces of optimizer state do not add up to its shard",
        cause="""A parameter counts as trainable but has no optimizer state, typically in a vision
            tower frozen during or after wrapping.""",
        fix="""Freeze before wrapping, wrap the frozen tower as its own FSDP unit, pass
            use_orig_params=True, and save with StateDictOptions(strict=False). With strict=False,
            torch skips what does not fit: check that all trained state is there.""",
        versions="The message exists from torch 2.2 on; EasyR1 changed its own code in April 2025.",
        sources=("hiyouga/EasyR1/issues/226", "hiyouga/EasyR1/issues/244"),
    ),
    Signature(
        code="RS205",
        cause_name="subset",
        message=re.compile(r"is not in the optimizer state\. The FSDPParamInfo has the param keys"),
        title="The optimizer does not hold every trainable parameter of an FSDP unit",
        cause="""The optimizer holds only some parameters of a unit, or requires_grad changed after
            building it.""",
        fix="""Before wrapping, set requires_grad=False for frozen parameters or wrap them in their
            own units. Give the optimizer all trainable parameters. Rebuild it after (un)freezing,
            which resets its state.""",
        versions="FSDP1; seen with torch 2.13.",
        sources=("https://docs.pytorch.org/docs/stable/fsdp.html",),
        checked="reproduced",
    ),
)
