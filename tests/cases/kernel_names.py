"""Kernels as GPUs name them, for the operators of a recorded step.

The names are those of public profiles (``tests/recompute/test_attention_kernels.py`` has where
each attention kernel is from). How long a kernel takes follows from the operator's shapes alone.
"""

import re
import zlib
from collections.abc import Iterator
from typing import Any, Literal

Event = dict[str, Any]
Vendor = Literal["cuda", "rocm"]
Library = Literal["torch", "transformer_engine", "triton"]

# Main kernel forward, and all kernels of a backward call, as public profiles have them.
ATTENTION: dict[str, tuple[str, tuple[str, ...]]] = {
    "flash_2": (
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, "
        "4, false, false, cutlass::bfloat16_t>, false, true>(pytorch_flash::Flash_fwd_params)",
        (
            "void pytorch_flash::flash_bwd_dot_do_o_kernel<true>(pytorch_flash::Flash_bwd_params)",
            "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::"
            "Flash_bwd_kernel_traits<64, 128, 128, 8>, false>(pytorch_flash::Flash_bwd_params)",
            "void pytorch_flash::flash_bwd_convert_dq_kernel<true>(pytorch_flash::Flash_bwd_params,"
            " int)",
        ),
    ),
    "flash_3": (
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<"
        "flash::CollectiveMainloopFwdSm90<2> > > >()",
        (
            "void cutlass::device_kernel<flash::FlashAttnBwdPreprocess<cute::C<64> > >()",
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnBwdSm90<"
            "flash::CollectiveMainloopBwdSm90<2, 2, 2> > > >()",
            "void cutlass::device_kernel<flash::FlashAttnBwdPostprocessConvertdQ<cute::C<64> > >()",
        ),
    ),
    "cudnn": (
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1",
        (
            "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>()",
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1",
            "void cudnn::fusion::convert_dq_to_16bits<true>()",
        ),
    ),
    "efficient": (
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<"
        "cutlass::bfloat16_t, cutlass::arch::Sm80, true, 64, 128, 128, true, true>::Params)",
        (
            "fmha_cutlassB_bf16_aligned_128x64_k65536_sm80(PyTorchMemEffAttention::"
            "AttentionBackwardKernel<cutlass::arch::Sm80, cutlass::bfloat16_t, true>::Params)",
        ),
    ),
    "aotriton": ("attn_fwd.kd", ("bwd_preprocess.kd", "bwd_kernel_dk_dv.kd", "bwd_kernel_dq.kd")),
    "triton": ("_attn_fwd", ("_attn_bwd_preprocess", "_attn_bwd")),
    "composable_kernel": (
        "void ck_tile::kentry<256, 3, ck_tile::FmhaFwdKernel<ck_tile::BlockFmhaPipelineQRKSVSAsync"
        "<ck_tile::BlockFmhaPipelineProblem<unsigned short, unsigned short> > > >()",
        (
            "void ck_tile::kentry<64, 2, ck_tile::FmhaBwdOGradDotOKernel<ck_tile::TileFmhaTraits> "
            ">()",
            "void ck_tile::kentry<256, 1, ck_tile::FmhaBwdDQDKDVKernel<ck_tile::BlockFmhaBwdDQDKDV"
            "PipelineKRKTRVR<ck_tile::TileFmhaTraits> > >()",
            "void ck_tile::kentry<64, 2, ck_tile::FmhaBwdConvertQGradKernel<"
            "ck_tile::TileFmhaTraits> >()",
        ),
    ),
    # Unfused: two products around a masked softmax of Transformer Engine's own.
    "transformer_engine": (
        "void transformer_engine::(anonymous namespace)::scaled_aligned_causal_masked_softmax_warp_"
        "forward<__nv_bfloat16, __nv_bfloat16, float, 9>(__nv_bfloat16*, __nv_bfloat16 const*)",
        (
            "void transformer_engine::(anonymous namespace)::scaled_aligned_causal_masked_softmax_"
            "warp_backward<__nv_bfloat16, __nv_bfloat16, float, 9>(__nv_bfloat16*, float)",
        ),
    ),
}

_ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::{}, "
    "std::array<char*, 2ul> >(int, at::native::{}, std::array<char*, 2ul>)"
)
_CLAMP = (
    "(anonymous namespace)::launch_clamp_scalar(at::TensorIteratorBase&, c10::Scalar, c10::Scalar, "
    "at::native::detail::ClampLimits)::{lambda(float)#1}"
)
_FUNCTORS = {
    "add": "CUDAFunctor_add<float>",
    "add_": "CUDAFunctor_add<float>",
    "mul": "BinaryFunctor<float, float, float, binary_internal::MulFunctor<float> >",
    "mul_": "BinaryFunctor<float, float, float, binary_internal::MulFunctor<float> >",
    "div": "BinaryFunctor<float, float, float, binary_internal::DivFunctor<float> >",
    "fill_": "FillFunctor<float>",
    "zero_": "FillFunctor<float>",
    "copy_": "float_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}",
    "gelu": "GeluCUDAKernelImpl(at::TensorIteratorBase&)::{lambda(float)#1}",
    "gelu_backward": "GeluBackwardCUDAKernelImpl(at::TensorIteratorBase&)::{lambda(float)#1}",
    "relu": _CLAMP,
    "relu_": _CLAMP,
    "clamp_min": _CLAMP,
    "clamp_min_": _CLAMP,
    "threshold_backward": (
        "BinaryFunctor<float, float, float, at::native::(anonymous namespace)::"
        "threshold_kernel_impl<float>(at::TensorIteratorBase&, float, float)::"
        "{lambda(float, float)#1}>"
    ),
    "native_dropout_backward": (
        "(anonymous namespace)::masked_scale_kernel<bool, float, float>(at::Tensor&, at::Tensor "
        "const&, at::Tensor const&, float)::{lambda(float, bool)#1}"
    ),
    "silu": "(anonymous namespace)::silu_kernel(at::TensorIteratorBase&)::{lambda(float)#1}",
    "silu_backward": (
        "(anonymous namespace)::silu_backward_kernel(at::TensorIteratorBase&)::{lambda(float)#1}"
    ),
}
# The same work by other libraries, where a shape has these.
_BY_LIBRARY: dict[Library, dict[str, tuple[str, ...]]] = {
    "torch": {},
    "transformer_engine": {
        "native_layer_norm": (
            "void transformer_engine::normalization::ln_fwd_tuned_kernel<transformer_engine::"
            "normalization::Kernel_traits<float, __nv_bfloat16, 1024u, 1u, 4u, 1u, 16u> >(int)",
        ),
        "native_layer_norm_backward": (
            "void transformer_engine::normalization::ln_bwd_tuned_kernel<transformer_engine::"
            "normalization::Kernel_traits<float, __nv_bfloat16, 1024u, 1u, 1u, 4u, 16u> >(int)",
            "void transformer_engine::normalization::ln_bwd_finalize_tuned_kernel<float>(int)",
        ),
        "gelu": ("void transformer_engine::unary_kernel<8, float, transformer_engine::Empty>()",),
        "gelu_backward": (
            "void transformer_engine::unary_grad_kernel<8, float, transformer_engine::Empty>()",
        ),
    },
    "triton": {
        "native_layer_norm": ("_layer_norm_forward_kernel",),
        "native_layer_norm_backward": ("_layer_norm_backward_kernel",),
        "gelu": ("triton_poi_fused_gelu_0",),
        "gelu_backward": ("triton_poi_fused_gelu_backward_1",),
        "_log_softmax": ("liger_cross_entropy_kernel",),
    },
}
_NAMED: dict[str, tuple[str, ...]] = {
    "native_layer_norm": (
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)",
    ),
    "native_layer_norm_backward": (
        "void at::native::(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<float>()",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float>()",
    ),
    "_log_softmax": (
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>()",
    ),
    "_log_softmax_backward_data": (
        "void at::native::(anonymous namespace)::cunn_SoftMaxBackward<4, float, float, float>()",
    ),
    "_softmax": ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 6>()",),
    "_softmax_backward_data": (
        "void (anonymous namespace)::softmax_warp_backward<float, float, float, 6>()",
    ),
    "nll_loss_forward": ("void at::native::nll_loss_forward_reduce_cuda_kernel_2d<float>()",),
    "nll_loss_backward": ("void at::native::nll_loss_backward_reduce_cuda_kernel_2d<float>()",),
    "index_select": ("void at::native::(anonymous namespace)::indexSelectLargeIndex<float>()",),
    "embedding_dense_backward": ("void at::native::embedding_backward_feature_kernel<float>()",),
    "native_batch_norm": (
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>(float)",
    ),
    "native_batch_norm_backward": (
        "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>(float)",
    ),
    "max_pool2d_with_indices": (
        "void at::native::(anonymous namespace)::max_pool_forward_nchw<float, float>(int)",
    ),
    "max_pool2d_with_indices_backward": (
        "void at::native::(anonymous namespace)::max_pool_backward_nchw<float, float>(int)",
    ),
    "native_dropout": (
        "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned "
        "int, 1, 4, bool>(float)",
    ),
    "mean": (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<"
        "float, float, float, float>, unsigned int, float, 4> >(float)",
    ),
    "cat": ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 4>()",),
    "sum": ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, sum> >()",),
}
# As MIOpen and torch's own kernels for ROCm are called.
_ON_ROCM: dict[str, tuple[str, ...]] = {
    "native_batch_norm": (
        "void at::native::batch_norm_collect_statistics_kernel<at::native::Var, float>(float)",
        "void at::native::batch_norm_transform_input_kernel<float, float, float, true, int>(float)",
    ),
    "native_batch_norm_backward": (
        "void at::native::batch_norm_backward_kernel<float, float, float, int>(float)",
    ),
}
# Convolutions by direction: the forward's, and what makes the gradients of input and weight.
_CONVOLUTIONS = {
    "cuda": (
        "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize{0}x64x32_stage5_"
        "warpsize2x2x1_g1_tensor16x8x8_execute_kernel_cudnn_infer",
        "sm80_xmma_dgrad_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize{0}x64x16_stage4_"
        "warpsize2x2x1_g1_tensor16x8x8_execute_kernel_cudnn_infer",
        "sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize{0}x64x64_"
        "stage4_warpsize2x2x1_g1_tensor16x8x8_execute_kernel_cudnn_train",
    ),
    "rocm": (
        "igemm_fwd_gtcx3_nhwc_fp32_bx0_ex1_bt{0}x64x32_wt32x32x8_ws1x1_wr1x2",
        "igemm_bwd_gtcx3_nhwc_fp32_bx0_ex1_bt{0}x64x32_wt32x32x8_ws1x1_wr2x2",
        "igemm_wrw_gtcx3_nhwc_fp32_bx0_ex0_bt{0}x64x32_wt32x32x8_ws1x1_wr2x2",
    ),
}
_CONVOLUTION = re.compile(
    r"(cudnn_|mkldnn_)?convolution(_overrideable)?|convolution_backward(_overrideable)?"
)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def kernels_of(
    operator: Event | None, kernel_us: float, vendor: Vendor, attention: str, library: Library
) -> Iterator[tuple[str, float, Event]]:
    """Name, time in µs, grid and block of each kernel that an operator launches.

    Args:
        operator: As Kineto writes it, with its shapes; ``None`` launches nothing.
        kernel_us: What an ordinary kernel takes.
        vendor: Whose names products bear.
        attention: Which attention runs, a key of ``ATTENTION``.
        library: Whose norms and activations run.
    """
    if operator is None:
        return
    plain = operator["name"].removeprefix("aten::")
    dims = operator["args"].get("Input Dims", [])
    numbers = [n for one in dims if isinstance(one, list) for n in one if isinstance(n, int)]
    size = 1
    for one in dims:
        count = 1
        for n in one if isinstance(one, list) else ():
            count *= n if isinstance(n, int) else 1
        size = max(size, count)
    place = {"grid": [max(1, size // 128), 1, 1], "block": [128, 1, 1]}
    us = kernel_us * (1 + (size.bit_length() % 7) / 8)
    forward, backward = ATTENTION[attention]
    if "scaled_dot_product" in plain and "backward" in plain:
        for name in backward:
            main = name == max(backward, key=len) or len(backward) == 1
            yield name, us * (3.5 if main else 0.3), place
        return
    if "scaled_dot_product" in plain:
        yield forward, us * 2, place
        return
    if plain in _PRODUCTS:
        strides = str(operator["args"].get("Input Strides"))
        kind = zlib.crc32(strides.encode()) % 3
        name = f"nvjet_tst_{64 << kind}x{numbers[-1] if numbers else 64}_64x4_2x1_v_bz_TNT"
        if vendor == "rocm":
            name = f"Cijk_Ailk_Bljk_SB_MT{64 << kind}x{numbers[-1] if numbers else 64}x32"
        # They stay on the device and share the work out, in either direction.
        yield (
            name,
            us * 2,
            place if vendor == "rocm" else {"grid": [2, 66, 1], "block": [384, 1, 1]},
        )
        return
    if _CONVOLUTION.fullmatch(plain):
        ours = _CONVOLUTIONS[vendor]
        for name in ours[1:] if "backward" in plain else ours[:1]:
            yield name.format(64 << zlib.crc32(str(dims[:2]).encode()) % 3), us * 2, place
        return
    named = _BY_LIBRARY[library].get(plain) or _NAMED.get(plain)
    if vendor == "rocm":
        named = _ON_ROCM.get(plain) or named
    if named is not None:
        for name in named:
            yield name, us * 0.5, place
        return
    functor = _FUNCTORS.get(plain, f"{plain}_kernel_cuda(at::TensorIteratorBase&)")
    yield _ELEMENTWISE.format(functor, functor), us * 0.3, place
