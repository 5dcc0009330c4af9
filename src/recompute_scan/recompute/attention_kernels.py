"""Recomputes by attention's kernels alone, and a check by the kernels around them.

Traces of device activity alone, Nsight exports without operator ranges, CUDA graphs, and compiled
code have this in common: nothing links a kernel to an operator of the model. Attention kernels
are still forward or backward by name (:data:`FAMILIES`), and their order shows recomputes
(:mod:`recompute_scan.recompute.kernel_order`). They show nothing else that ran: a checkpoint that
keeps attention's results, or recomputes attention alone, looks like none or like a whole one.

Names are one account, the sequence of all kernels is another: both have to agree.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import pairwise, product
from typing import Literal, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.numpy_tools import median, places_of
from recompute_scan.recompute.kernel_order import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    KernelSequence,
    Pass,
    passes_by_order,
    passes_by_thread,
    with_recomputes,
)
from recompute_scan.recompute.roles import Structure
from recompute_scan.recompute.verdict import Judgement
from recompute_scan.result import Family
from recompute_scan.trace.calls import Calls, Kernels, StepSpan, find_steps, marks_steps, step_of
from recompute_scan.trace.columns import NS_PER_MS, Bool, Int64, Kind, Trace

Direction = Literal["forward", "backward"]

# Text allowed before a name, in `pytorch_flash::name` and in the mangled `_ZN…16nameI…`.
_BEGIN = r"(?<![A-Za-z_])"
# Text allowed behind it: template arguments, parameters, or nothing.
_END = r"(?=[<(I]|E|\.kd|$)"
_SOFTMAX = rf"{_BEGIN}scaled_((upper_triang_|aligned_causal_)?masked_)?softmax_warp"


class KernelFamily(NamedTuple):
    """One implementation of attention, named as in ``Family.family`` of the result.

    A main kernel's name has one of the patterns, no other kernel's has; a backward call has one
    main kernel.
    """

    name: str
    forward: str
    backward: str


# Why these patterns, and where the kernels are named.
FAMILIES: tuple[KernelFamily, ...] = (
    # torch's copy is in `pytorch_flash`. Split keys take another forward kernel and a combination.
    # Helpers: flash_bwd_dot_do_o_kernel, flash_bwd_convert_dq_kernel, … Source:
    # Dao-AILab/flash-attention: csrc/flash_attn/src/flash_fwd_launch_template.h,
    # flash_bwd_launch_template.h.
    KernelFamily(
        "flash_attention_2",
        rf"{_BEGIN}flash_fwd(_splitkv)?_kernel{_END}",
        rf"{_BEGIN}flash_bwd_dq_dk_dv_loop(_seqk_parallel)?_kernel{_END}",
    ),
    # torch 2.0 and 2.1 carry it in `pytorch_fmha`. Helper: fmha_bwd_dot_do_o_kernel. Source:
    # Dao-AILab/flash-attention v1: csrc/flash_attn/src/fmha_fwd_launch_template.h,
    # fmha_bwd_launch_template.h.
    KernelFamily(
        "flash_attention_1",
        rf"{_BEGIN}fmha_fwd_loop_kernel{_END}",
        rf"{_BEGIN}fmha_bwd_dq_dk_dv_loop_kernel{_END}",
    ),
    # All are cutlass::device_kernel<…>; the class inside differs. The first releases had
    # another forward, compute_attn_ws. Helpers: FlashAttnBwdPreprocess,
    # FlashAttnBwdPostprocessConvertdQ, prepare_varlen_num_blocks_kernel, FlashAttnFwdCombine.
    # Source: Dao-AILab/flash-attention:
    # hopper/flash_fwd_launch_template.h, flash_bwd_launch_template.h; seen in
    # traces/public/h100-nanogpt-compiled.
    KernelFamily(
        "flash_attention_3",
        rf"FlashAttnFwd(Sm\d+)?{_END}|{_BEGIN}compute_attn_ws(_fp8)?{_END}",
        rf"FlashAttnBwd(Sm\d+)?{_END}",
    ),
    # CuTe DSL makes one word of module, class and arguments. Helpers:
    # FlashAttentionBackwardPreprocess, …Postprocess, FlashAttentionForwardCombine. Source:
    # Dao-AILab/flash-attention: flash_attn/cute/flash_fwd_sm90.py, flash_bwd_sm90.py,
    # flash_fwd_sm100.py, flash_bwd_sm100.py.
    KernelFamily(
        "flash_attention_4", r"FlashAttentionForwardSm\d+", r"FlashAttentionBackwardSm\d+"
    ),
    # cuDNN names what it generates after the graph. Transformer Engine's fused attention runs it
    # too. Helpers: cudnn::fusion::compute_dot_do_o…, convert_dq_to_16bits, … Source: profiles in
    # public repositories:
    # cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_…,
    # …_flash_bprop_wgmma_f16_knob_26_64x64x128_….
    KernelFamily(
        "cudnn_attention", r"cudnn_generated_\w*sdpa_\w*fprop", r"cudnn_generated_\w*sdpa_\w*bprop"
    ),
    # torch's and xFormers' memory-efficient attention: F forward, B backward, one kernel each.
    # Source: pytorch/pytorch: aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernels/;
    # forward seen in traces/public/a100-segment-anything-inference.
    KernelFamily("efficient_attention", rf"{_BEGIN}fmha_cutlassF_", rf"{_BEGIN}fmha_cutlassB_"),
    # Transformer Engine's, Megatron's and Apex's unfused attention: its masked softmax runs once
    # per call and in attention only. torch's own softmax_warp_forward is anybody's. Source:
    # NVIDIA/TransformerEngine: transformer_engine/common/fused_softmax/.
    KernelFamily(
        "fused_softmax_attention",
        rf"{_SOFTMAX}_forward{_END}",
        rf"{_SOFTMAX}_backward(_masked)?(?=[<(I]|E|$)",
    ),
    # Inductor's template kernels are triton_tem_…; a kernel fused with attention's inputs or
    # outputs (triton_poi_fused__flash_attn_backward_…) is no attention. Source: pytorch/pytorch:
    # torch/_inductor/kernel/flex_attention.py.
    KernelFamily(
        "flex_attention",
        r"^triton_tem_fused_(?!\w*backward)\w*flex_attention",
        r"^triton_tem_fused_\w*flex_attention_backward",
    ),
    # Triton's tutorial, and AOTriton, which is torch's flash and efficient attention on ROCm.
    # AOTriton's backward is one kernel, or one for dK and dV, which is counted, and bwd_kernel_dq.
    # Helpers: _attn_bwd_preprocess, bwd_preprocess. Source: triton-lang/triton:
    # python/tutorials/06-fused-attention.py; ROCm/aotriton: tritonsrc/.
    KernelFamily(
        "triton_attention",
        r"^_?attn_fwd(_\d\w*)?(\.kd)?$",
        r"^(_attn_bwd|bwd_kernel_dk_dv|bwd_kernel_fuse)(_\d\w*)?(\.kd)?$",
    ),
    # CK's kernels are arguments of ck_tile::kentry or make_kernel. Helpers: FmhaBwdOGradDotOKernel,
    # FmhaBwdConvertQGradKernel, FmhaFwdSplitKVCombineKernel. Source: ROCm/composable_kernel:
    # include/ck_tile/ops/fmha/kernel/.
    KernelFamily(
        "composable_kernel_attention",
        r"FmhaFwd(SplitKV)?Kernel(?=[<I])",
        r"FmhaBwdDQDKDVKernel(?=[<I])",
    ),
    # AITER's assembly kernels say direction, head size and type. Helpers: fmha_bwd_hd128_odo_bf16,
    # …_dq_convert_bf16, …_dq_shuffle. Source: ROCm/aiter: hsa/gfx942/fmha_v3_fwd/, fmha_v3_bwd/.
    KernelFamily(
        "aiter_attention",
        rf"{_BEGIN}fmha_fwd_hd\d+(x\d+)?_(bf16|fp16|fp8)",
        rf"{_BEGIN}fmha_bwd_hd\d+(x\d+)?_(bf16|fp16|fp8)",
    ),
)


def attention_role(name: str) -> tuple[str, Direction] | None:
    """Family and direction of an attention call's main kernel; ``None`` for any other."""
    return next((role for pattern, role in _patterns() if pattern.search(name)), None)


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], tuple[str, Direction]], ...]:
    # Compiled where kernels are: a trace of a CPU has none. Backward first: a family's backward
    # may hold the name of its forward.
    ways: tuple[Direction, ...] = ("backward", "forward")
    each = product(FAMILIES, ways)
    return tuple((re.compile(getattr(one, way)), (one.name, way)) for one, way in each)


GRAPH_LAUNCH = re.compile(r"(cuda|hip|cu)GraphLaunch")
# Kernels of other operators that say which pass they are of.
NAMED_BACKWARD = re.compile(r"backward|bwd|dgrad|wgrad|grad_?input", re.I)
# Ranges that people put around a training step by hand, in NVTX or `record_function`.
NAMED_STEP = re.compile(r"(train(ing)?[ _]?)?(step|iter|iteration)[ _#:=]*(\d+)$", re.I)


# By the code of its name: family and direction of each kernel that is counted.
Roles = dict[int, tuple[str, Direction]]


class KernelStep(Struct, frozen=True):
    """Attention in one step, or in the whole recording where nothing marks steps.

    Attributes:
        passes: Its backward passes; ``None`` where their order cannot be read.
        idle: Attention forwards of its forward passes without a backward: evaluation, another
            model, or a pass that was cut.
    """

    span: StepSpan
    passes: tuple[Pass, ...] | None
    idle: int

    @property
    def highest(self) -> int | None:
        """The highest m in the step; ``None`` where it is unknown."""
        return None if self.passes is None else max((p.highest for p in self.passes), default=0)


class KernelEvidence(Struct, frozen=True):
    """The recomputes that attention's kernels show in one trace.

    Attributes:
        families: Families that ran in the counted steps, per step that holds an attention
            backward; their times count the main kernels only. Where threads do not separate
            recomputes from the forward pass, each backward is taken to have had one forward, and
            the forwards beyond those to have run again.
        steps: Steps that hold an attention backward.
        steps_marked: Whether the trace marks its steps.
        by_thread: Whether the launching thread separated recomputes from the forward pass,
            and not by their order alone.
        judgement: The verdict on attention.
        rows: Positions in :class:`Kernels` of the main kernels, in order of launch.
        events: What each of these is, as :mod:`recompute_scan.recompute.kernel_order` spells.
    """

    families: tuple[Family, ...]
    steps: tuple[KernelStep, ...]
    steps_marked: bool
    by_thread: bool
    judgement: Judgement
    rows: Int64
    events: tuple[str, ...]

    @property
    def passes(self) -> list[Pass]:
        """All backward passes that could be read."""
        return [each for step in self.steps for each in step.passes or ()]

    def sequence(self, trace: Trace, kernels: Kernels) -> KernelSequence | None:
        """All kernels around attention's; ``None`` where recomputes are not known among these."""
        events = with_recomputes(self.events, self.passes)
        if events is None or self.judgement.verdict == "inconclusive":
            return None
        highest = int(self.judgement.highest or 0)
        return KernelSequence(trace, kernels, self.rows, events, highest)

    @property
    def notes(self) -> tuple[str, ...]:
        """Limits of this evidence, one sentence each."""
        found = [
            "Only attention could be counted, by the names of its kernels. Around it, kernels ran "
            "again where they repeat the forward pass's. A checkpoint that keeps attention's "
            "results looks like no checkpoint."
        ]
        if not self.by_thread:
            found.append(
                "The launching threads do not separate forward and backward passes, so "
                "recomputes are inferred from kernel order."
            )
        if not self.steps_marked:
            found.append("The trace does not mark steps, so counts cover the whole recording.")
        if idle := sum(step.idle for step in self.steps):
            found.append(
                f"Attention forwards without a backward: {idle} (evaluation, another "
                "model, or a pass that was cut)."
            )
        return tuple(found)


def read_kernels(trace: Trace, calls: Calls, kernels: Kernels) -> KernelEvidence | None:
    """The evidence of attention's kernels; ``None`` where no attention backward ran.

    Kernels belong to the step that launched them. Those without a record of their launch are
    left out, unless no kernel has one: then the whole recording is one step.
    """
    roles = _roles(trace, kernels.event)
    code = trace.name[kernels.event]
    main = np.isin(code, np.array(sorted(roles), np.int64))
    named = np.array([bool(NAMED_BACKWARD.search(name)) for name in trace.names], np.bool_)
    beside = np.flatnonzero(named[code] & ~main)
    rows = np.flatnonzero(main)
    launched = bool((kernels.launch >= 0).any())
    if launched:
        rows, beside = (each[kernels.launch[each] >= 0] for each in (rows, beside))
    # In the order in which they were launched, or ran.
    when = calls.start[kernels.launch[rows]] if launched else kernels.start[rows]
    order = np.lexsort((kernels.start[rows], when))
    rows, when = rows[order], when[order]
    mine = [roles[code] for code in trace.name[kernels.event[rows]].tolist()]
    backward = np.array([direction == "backward" for _, direction in mine], np.bool_)
    if not backward.any():
        return None
    forward_pass = _of_forward_pass(calls, kernels.launch[rows], backward) if launched else None
    first = True if forward_pass is None else forward_pass
    events = np.where(backward, BACKWARD, np.where(first, FORWARD, RECOMPUTE)).tolist()
    find = find_steps if marks_steps(calls) else _named_steps
    marked = find(calls) if launched else []
    steps = marked or [StepSpan(0, int(when[0]), int(when[-1]) + 1)]
    step = step_of(steps, when)
    parted = _parted(trace, kernels, rows, beside)
    of_step = places_of(step)
    found = tuple(
        _read_step(
            steps[place],
            [events[row] for row in of_step[place]],
            forward_pass is not None,
            bool(marked),
            [parted[row] for row in of_step[place]],
        )
        for place in of_step
        if place >= 0 and backward[of_step[place]].any()
    )
    times = kernels.time[rows].tolist()
    inside = [(mine[row][0], events[row], times[row]) for row in np.flatnonzero(step >= 0)]
    evidence = KernelEvidence(
        families=_count_families(inside, forward_pass is not None, max(1, len(found))),
        steps=found,
        steps_marked=bool(marked),
        by_thread=forward_pass is not None,
        judgement=_judge(found),
        rows=rows,
        events=tuple(events),
    )
    return _settled(trace, kernels, evidence)


def hides_backward(trace: Trace, structure: Structure, kernels: Kernels) -> bool:
    """Do graph launches hold most of the backward pass's device time, or attention's backward?

    What a graph runs has no operators in the trace, so they show the smaller part.
    """
    calls = structure.calls
    launched = kernels.launch >= 0
    launch, event = kernels.launch[launched], kernels.event[launched]
    time = kernels.time[launched]
    graph = calls.where(GRAPH_LAUNCH.match)[launch]
    if not graph.any():
        return False
    in_backward = structure.engine[launch] >= 0
    if 2 * time[graph & in_backward].sum() > time[in_backward].sum():
        return True
    return any(way == "backward" for _, way in _roles(trace, event[graph]).values())


def _roles(trace: Trace, events: Int64) -> Roles:
    """By the code of its name: family and direction of each main attention kernel among them."""
    names = np.unique(trace.name[events[trace.kind[events] == Kind.KERNEL]]).tolist()
    roles = ((name, attention_role(trace.names[name])) for name in names)
    return {name: role for name, role in roles if role is not None}


def _parted(trace: Trace, kernels: Kernels, rows: Int64, named: Int64) -> list[frozenset[int]]:
    """For each kernel: names in ``named`` that begin between it and the kernel before."""
    named = named[kernels.start[named].argsort(kind="stable")]
    name = trace.name[kernels.event[named]]
    number = kernels.start[named].searchsorted(kernels.start[rows])
    both = pairwise([*number[:1].tolist(), *number.tolist()])
    return [frozenset(name[start:stop].tolist()) for start, stop in both]


def _named_steps(calls: Calls) -> list[StepSpan]:
    """Steps marked by ranges of the user's own, where these follow each other."""
    rows = calls.named(NAMED_STEP)
    rows = rows[calls.start[rows].argsort(kind="stable")]
    if not len(rows) or (calls.start[rows[1:]] < calls.end[rows[:-1]]).any():
        return []
    numbers = (NAMED_STEP.match(calls.called(row)) for row in rows)
    return [
        StepSpan(int(number[4][-9:]), int(calls.start[row]), int(calls.end[row]))
        for row, number in zip(rows, numbers, strict=True)
        if number
    ]


def _of_forward_pass(calls: Calls, launch: Int64, backward: Bool) -> Bool | None:
    """For each attention kernel: did a thread launch it that launches no backward?

    ``None`` where the threads do not show it: each backward has a forward from such a thread, but
    for what recording missed.
    """
    thread = calls.thread[launch]
    found = ~np.isin(thread, np.unique(thread[backward]))
    return found if 2 * found.sum() >= backward.sum() else None


def _read_step(
    span: StepSpan, events: list[str], by_thread: bool, marked: bool, parted: list[frozenset[int]]
) -> KernelStep:
    idle = 0
    if by_thread:
        # A backward without its forward in the recording is no separate pass.
        events = events[events.index(FORWARD) if FORWARD in events else len(events) :]
        passes = passes_by_thread(events, not marked)
        if passes is not None:
            idle = events.count(FORWARD) - sum(each.layers for each in passes)
    else:
        passes = passes_by_order(events, not marked, parted)
    return KernelStep(span, None if passes is None else tuple(passes), max(0, idle))


def _count_families(
    kernels: Sequence[tuple[str, str, int]], by_thread: bool, steps: int
) -> tuple[Family, ...]:
    """The families of some kernels, each with its family, event and time, ns."""
    counts, spent = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for name, event, time in kernels:
        counts[name, event] += 1
        spent[name, event] += time
    found = []
    for name in sorted({name for name, _ in counts}):
        forward, again, backward = (counts[name, event] for event in (FORWARD, RECOMPUTE, BACKWARD))
        again_ns = float(spent[name, RECOMPUTE])
        if not by_thread and forward > backward > 0:
            again = forward - backward
            again_ns = spent[name, FORWARD] * again / forward
            forward = backward
        per_step = (forward / steps, again / steps, backward / steps, again_ns / NS_PER_MS / steps)
        found.append(Family(name, "attention", *per_step))
    return tuple(found)


def _judge(steps: tuple[KernelStep, ...]) -> Judgement:
    passes = [each for step in steps for each in step.passes or ()]
    if not passes or any(step.passes is None for step in steps):
        return Judgement(
            "inconclusive",
            "The order of attention's kernels does not show which are recomputes and which belong "
            "to other forward passes.",
        )
    highest = max(each.highest for each in passes)
    if highest >= 2:
        return Judgement("doubled", None, float(highest))
    if not highest:
        return Judgement("none", None, 0.0)
    whole = all(each.whole for each in passes)
    return Judgement("full" if whole else "partial", None, float(highest))


# A recompute that repeats less of a layer's kernels is not known to be one of the whole layer.
_WHOLE = 0.7
PRODUCT = re.compile(r"gemm|nvjet|cijk|cutlass|xmma|ampere_|volta_|turing_|sm\d\d_", re.I)
# Two, and the products of a second loss.
_MOST_PRODUCTS = 2.1
_ATTENTION = re.compile(r"flash|attn|attention|fmha|sdpa", re.I)


def _settled(trace: Trace, kernels: Kernels, found: KernelEvidence) -> KernelEvidence:
    """The evidence, or ``inconclusive`` where the kernels around attention do not agree with it.

    A checkpoint around attention alone, or one that keeps the results of matrix products, runs
    attention again as one around the whole layer does. More products than gradients take are
    recomputes of operators without attention.
    """
    sequence = found.sequence(trace, kernels)
    if sequence is None:
        return found
    reason = None
    if (found.judgement.highest or 0) < 2 and more_products(trace, sequence):
        reason = (
            "The backward pass runs more matrix products than gradients need: some may be "
            "recomputes."
        )
    elif found.judgement.verdict == "full":
        events = np.array(sequence.events)
        between, again = np.diff(sequence.at[events == FORWARD]), (events == RECOMPUTE).sum()
        if len(between) and sequence.again.sum() < _WHOLE * median(between) * again:
            reason = (
                "Attention runs again, and most of the kernels around do not: a checkpoint that "
                "keeps results looks like one with kernels in another order."
            )
    return replace(found, judgement=Judgement("inconclusive", reason)) if reason else found


def more_products(trace: Trace, sequence: KernelSequence) -> bool:
    """Are there more products in the backward pass, except recomputed ones, than gradients take?

    Between its first counted kernel and its last the backward pass goes through the same
    products as the forward between its own: two for each. Compiled code has products in other
    kernels, so there the answer is no.
    """
    if any(name.startswith("triton_") for name in trace.names):
        return False
    untold = [
        bool(PRODUCT.search(name) and not (_ATTENTION.search(name) or NAMED_BACKWARD.search(name)))
        for name in trace.names
    ]
    products = np.array(untold, np.bool_)[sequence.token] & ~sequence.again
    forward, backward = (int(products[one].sum()) for one in sequence.spans())
    # A second loss goes through the same layers again: counted is from one event to the next.
    counted = [event for event in sequence.events if event != RECOMPUTE]
    steps = Counter(pair for pair in pairwise(counted) if len(set(pair)) == 1)
    way, back = steps[FORWARD, FORWARD], steps[BACKWARD, BACKWARD]
    return backward * way > _MOST_PRODUCTS * forward * back > 0
