"""Names of attention kernels, as they stand in real profiles or follow from sources."""

import re
from pathlib import Path

import pytest

from recompute_scan.recompute.attention_kernels import FAMILIES, attention_role
from tests.recompute.attention_traces import ALL

PUBLIC = Path(__file__).parents[2] / "traces" / "public"

# Full names out of profiles and reports in public repositories; "…" where their author cut them.
# No profile was found for FlashAttention 1, CK and `_attn_bwd`: those follow from the sources that
# `attention_kernels` names.
FORWARD = {
    "flash_attention_2": (
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<(int)128, (int)128, (int)64, (int)4>>",
        "_ZN13pytorch_flash16flash_fwd_kernelINS_23Flash_fwd_kernel_traitsILi64ELi128ELi128ELi4EL"
        "b0ELb0EN7cutlass6half_tENS_19Flash_kernel_traitsILi64ELi128ELi128ELi4ES3_EEEELb0ELb1EEEv",
        "void pytorch_flash::flash_fwd_splitkv_kernel<pytorch_flash::Flash_fwd_kernel_traits<64>>",
    ),
    "flash_attention_1": ("void fmha_fwd_loop_kernel<FMHA_kernel_traits<128, 64, 16>, false>",),
    "flash_attention_3": (
        "void flash::compute_attn_ws<flash::CollectiveMainloopFwdSm90<…>>",
        "flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<…>>>",
    ),
    "flash_attention_4": (
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at__"
        "tensor0000o11101213_tensor0000o11101213_tensor0000o10111213_None_None_None_Non_0",
        "kernel_cutlass_flash_attncuteflash_fwdFlashAttentionForwardSm90_object_at__tensor0000o111",
    ),
    "cudnn_attention": (
        "cudnn_generated_fort_native_sdpa_sm80_flash_fprop_wmma_f16_knob_3_64x64x128_4x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm100_flash_fprop_f16_knob_7_128x128x128_4x1x1_cga1x1x1",
    ),
    "efficient_attention": ("fmha_cutlassF_f16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::…)",),
    "fused_softmax_attention": (
        "void transformer_engine::scaled_aligned_causal_masked_softmax_warp_forward<half, 9>",
        "void scaled_upper_triang_masked_softmax_warp_forward<c10::Half, c10::Half, float, 10>",
    ),
    "flex_attention": ("triton_tem_fused_flex_attention_0",),
    "triton_attention": ("_attn_fwd", "attn_fwd", "attn_fwd.kd", "_attn_fwd_0d1d2d34d5d6de"),
    "composable_kernel_attention": (
        "void ck_tile::kentry<256, 3, ck_tile::FmhaFwdKernel<ck_tile::BlockFmhaPipelineQRKSVSAsync"
        "<ck_tile::BlockFmhaPipelineProblem<unsigned short, unsigned short>>>>",
    ),
    "aiter_attention": (
        "aiter::fmha_fwd_hd128_bf16_causal_rtna_group",
        "aiter::fmha_fwd_hd128_bf16_group",
    ),
}  # fmt: skip
BACKWARD = {
    "flash_attention_2": (
        "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<(int)128>>",
    ),
    "flash_attention_1": ("void fmha_bwd_dq_dk_dv_loop_kernel<FMHA_kernel_traits<128>, false>",),
    "flash_attention_3": (
        "void cutlass::device_kernel<flash::enable_sm80_to_sm89<flash::FlashAttnBwdSm80<…>>>",
    ),
    "flash_attention_4": (
        "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at__t",
    ),
    "cudnn_attention": (
        "cudnn_generated_fort_native_sdpa_sm100_flash_bprop_f16_knob_31_128x128x128_1x4x1_cga1x1x1",
    ),
    "efficient_attention": (
        "fmha_cutlassB_bf16_aligned_64x64_k192_seqaligned_sm80(PyTorchMemEffAttention::…)",
    ),
    "fused_softmax_attention": (
        "void scaled_upper_triang_masked_softmax_warp_backward<c10::Half, c10::Half, float, 10>",
        "void transformer_engine::scaled_aligned_causal_masked_softmax_warp_backward<half, 9>",
    ),
    "flex_attention": (
        "triton_tem_fused_flex_attention_backward_2",
        "triton_tem_fused_flex_attention_backward_transpose_view_3",
        "triton_tem_fused_flex_attention_backward_mul_1",
    ),
    "triton_attention": ("_attn_bwd", "bwd_kernel_dk_dv", "bwd_kernel_fuse.kd"),
    "composable_kernel_attention": (
        "void ck_tile::kentry<256, 1, ck_tile::FmhaBwdDQDKDVKernel<ck_tile::BlockFmhaBwdDQDKDV"
        "PipelineKRKTRVR<…>>>",
    ),
    "aiter_attention": (
        "aiter::fmha_bwd_hd128_bf16_causal_br_a32_rtna_psskddv",
        "_ZN5aiter38fmha_bwd_hd128_bf16_causal_br_a32_psskE",
    ),
}
# Helpers of attention, and kernels that only look like it.
NEITHER = (
    "void flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<(int)128>>",
    "void flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<(int)128>>",
    "void pytorch_flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<64>>",
    "void fmha_bwd_dot_do_o_kernel<FMHA_kernel_traits<128>>",
    "void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<8>>>>",
    "kernel_cutlass_kernel_flash_attncuteflash_bwd_preprocessFlashAttentionBackwardPreprocess_obj",
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_combineFlashAttentionForwardCombine_object_at",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(…)",
    "void cudnn::fusion::convert_dq_to_16bits<true>(…)",
    "triton_poi_fused_zeros_flex_attention_backward_1",
    "triton_poi_fused__flash_attn_backward__unsafe_view_mul_sigmoid_view_32",
    "_attn_bwd_preprocess",
    "bwd_preprocess",
    "bwd_kernel_dq",
    "_fwd_kernel",
    "_bwd_kernel",
    "void ck_tile::kentry<64, 2, ck_tile::FmhaBwdOGradDotOKernel<…>>",
    "void ck_tile::kentry<64, 2, ck_tile::FmhaBwdConvertQGradKernel<…>>",
    "aiter::fmha_bwd_hd128_odo_bf16",
    "aiter::fmha_bwd_hd128_dq_convert_bf16",
    "aiter::fmha_bwd_hd128_dq_shuffle",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>",
    "void (anonymous namespace)::softmax_warp_backward<float, float, float, 6, false, false>",
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN",
    "Cijk_Alik_Bljk_BBS_BH_MT128x128x32_SIA3_WGM8.kd",
    "void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>",
)


def pairs(table: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(family, name) for family, names in table.items() for name in names]


def test_every_family_has_real_names() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    assert set(names) == set(FORWARD) == set(BACKWARD)


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_name_is_of_one_family_and_direction(kind: str) -> None:
    for family, name in pairs(FORWARD if kind == "forward" else BACKWARD):
        assert attention_role(name) == (family, kind), name
        fits = [
            f.name for f in FAMILIES if re.search(f.forward, name) or re.search(f.backward, name)
        ]
        assert fits == [family], name


@pytest.mark.parametrize("name", NEITHER)
def test_neither(name: str) -> None:
    assert attention_role(name) is None


@pytest.mark.parametrize("family", ALL)
def test_the_names_that_traces_are_built_of(family: str) -> None:
    names = ALL[family]
    assert attention_role(names.forward) == (family, "forward")
    assert attention_role(names.backward) == (family, "backward")
    assert {attention_role(name) for name in (*names.before, *names.behind)} <= {None}
