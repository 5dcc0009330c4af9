"""Attention kernels by name: which family, and forward or backward.

A fused attention call runs one main kernel forward and one main kernel backward, so the main
kernels of a step stand as (1 + m) : 1. The helpers around them (the row sums of dO·O before, the
conversion of dQ behind, the combination of split keys) belong to neither side.

Patterns are searched in the whole name. The part before the first ``<`` says nothing in half of
the families: FlashAttention 3's forward and backward are both ``cutlass::device_kernel<…``.
Names may be mangled, where Kineto could not tell them, or end in ``.kd``, as ROCm writes them.

Names of other kernels are no evidence: ``nvjet_*``, ``ampere_*`` and ``Cijk_*`` multiply
matrices in both directions, a softmax or a normalization is anybody's. Nor is a Triton kernel that
is called ``_fwd_kernel`` or ``_bwd_kernel``: many libraries have one, for other work too.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Literal, NamedTuple

Direction = Literal["forward", "backward"]

# What may be before a name, in `pytorch_flash::name` and in the mangled `_ZN…16nameI…`.
_BEGIN = r"(?<![A-Za-z_])"
# What may be behind it: template arguments, parameters, or nothing.
_END = r"(?=[<(I]|E|\.kd|$)"


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
    # All are cutlass::device_kernel<…>; the class inside tells. The first releases had a forward of
    # their own, compute_attn_ws. Helpers: FlashAttnBwdPreprocess, FlashAttnBwdPostprocessConvertdQ,
    # prepare_varlen_num_blocks_kernel, FlashAttnFwdCombine. Source: Dao-AILab/flash-attention:
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
        "flash_attention_4",
        r"FlashAttentionForwardSm\d+",
        r"FlashAttentionBackwardSm\d+",
    ),
    # cuDNN names what it generates after the graph. Transformer Engine's fused attention runs it
    # too. Helpers: cudnn::fusion::compute_dot_do_o…, convert_dq_to_16bits, … Source: profiles in
    # public repositories:
    # cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_…,
    # …_flash_bprop_wgmma_f16_knob_26_64x64x128_….
    KernelFamily(
        "cudnn_attention",
        r"cudnn_generated_\w*sdpa_\w*fprop",
        r"cudnn_generated_\w*sdpa_\w*bprop",
    ),
    # torch's and xFormers' memory-efficient attention: F forward, B backward, one kernel each.
    # Source: pytorch/pytorch: aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernels/;
    # forward seen in traces/public/a100-segment-anything-inference.
    KernelFamily(
        "efficient_attention",
        rf"{_BEGIN}fmha_cutlassF_",
        rf"{_BEGIN}fmha_cutlassB_",
    ),
    # Transformer Engine's, Megatron's and Apex's unfused attention: its masked softmax runs once
    # per call and in attention only. torch's own softmax_warp_forward is anybody's. Source:
    # NVIDIA/TransformerEngine: transformer_engine/common/fused_softmax/.
    KernelFamily(
        "fused_softmax_attention",
        (
            rf"{_BEGIN}scaled_(upper_triang_masked_|masked_|aligned_causal_masked_)?"
            rf"softmax_warp_forward{_END}"
        ),
        (
            rf"{_BEGIN}scaled_(upper_triang_masked_|masked_|aligned_causal_masked_)?"
            r"softmax_warp_backward(_masked)?(?=[<(I]|E|$)"
        ),
    ),
    # Inductor's template kernels are triton_tem_…; what it fuses with attention's inputs or outputs
    # (triton_poi_fused__flash_attn_backward_…) is no attention. Source: pytorch/pytorch:
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
    found: list[tuple[re.Pattern[str], tuple[str, Direction]]] = []
    for family in FAMILIES:
        found.append((re.compile(family.backward), (family.name, "backward")))
        found.append((re.compile(family.forward), (family.name, "forward")))
    return tuple(found)
