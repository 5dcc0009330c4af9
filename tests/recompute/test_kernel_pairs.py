"""Verdicts without attention, from kernels whose names differ by their direction alone."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from recompute_scan.analysis.answer import result_of
from recompute_scan.result import Result
from tests.recompute.attention_traces import FLASH_2, Layout, Names, each_layer, recorded
from tests.trace.kineto_reading import parse
from tests.trace_builder import as_bytes

PUBLIC = Path(__file__).parents[2] / "traces" / "public"
VERDICTS = {0: "none", 1: "full", 2: "doubled", 3: "doubled"}
# As in published traces; Mamba's as in its sources.
PAIRS = {
    "softmax": Names(
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 6, false, false>()",
        "void (anonymous namespace)::softmax_warp_backward<float, float, float, 6, false, false>()",
    ),
    "cudnn_norm": Names(
        "void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>(float)",
        "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>(float)",
    ),
    "silu": Names(
        "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::"
        "silu_kernel(at::TensorIteratorBase&)::{lambda()#1} >()",
        "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::"
        "silu_backward_kernel(at::TensorIteratorBase&)::{lambda()#1} >()",
    ),
    "gelu": Names(
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl() >()",
        "void at::native::vectorized_elementwise_kernel<4, at::native::"
        "GeluBackwardCUDAKernelImpl() >()",
    ),
    "engine_norm": Names(
        "void transformer_engine::layer_norm::ln_fwd_general_kernel<float>()",
        "void transformer_engine::layer_norm::ln_bwd_general_kernel<float>()",
        behind=("void transformer_engine::layer_norm::ln_bwd_finalize_general_kernel<float>()",),
    ),
    "mamba": Names(
        "void selective_scan_fwd_kernel<Selective_Scan_fwd_kernel_traits<32, 4> >(SSMParamsBase)",
        "void selective_scan_bwd_kernel<Selective_Scan_bwd_kernel_traits<32, 4> >(SSMParamsBwd)",
    ),
    "relu": Names(
        "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::"
        "launch_clamp_scalar(at::TensorIteratorBase&, c10::Scalar)::{lambda()#1} >()",
        "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, "
        "float, at::native::(anonymous namespace)::threshold_kernel_impl<float>() > >()",
    ),
}


def answer(events: list[dict[str, Any]]) -> Result:
    return result_of(parse(as_bytes({"traceEvents": events}), "kernels"))


@pytest.mark.parametrize("threads", ["two", "one", "none"])
@pytest.mark.parametrize("levels", VERDICTS)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_is_read_as_attention_is(pair: str, levels: int, threads: Any) -> None:
    result = answer(recorded(Layout(5, each_layer(5, levels), PAIRS[pair], threads=threads)))
    assert (result.verdict, result.recompute_per_backward) == (VERDICTS[levels], levels)
    assert (result.evidence_level, result.attention) == ("kernels", None)
    assert [family.kind for family in result.families] == ["other"]
    assert "counted forward kernel" in result.headline
    assert any("No attention is known" in warning for warning in result.warnings)
    assert result.cost is not None
    assert (result.cost.redundant_recompute_ms > 0) == (levels > 1)


def test_one_kernel_a_pass_clears_nothing() -> None:
    """As a loss: what the rest of the model does, it does not tell."""
    result = answer(recorded(Layout(1, names=PAIRS["softmax"])))
    assert result.verdict == "inconclusive"


def test_names_that_share_no_stem_are_no_pair() -> None:
    names = Names("void rms_norm_fwd_kernel<float>()", "void rotary_bwd_kernel<float>()")
    assert answer(recorded(Layout(4, each_layer(4), names))).verdict == "inconclusive"


@pytest.mark.parametrize("family", [FLASH_2, PAIRS["gelu"]])
@pytest.mark.parametrize("levels", [1, 2])
def test_what_a_hook_runs_is_no_recompute(family: Names, levels: int) -> None:
    """A kernel that is part of neither pass follows each run: something else used its result."""
    events = recorded(Layout(4, each_layer(4, levels), family))
    sound = answer(events)
    assert sound.verdict == VERDICTS[levels]
    threads = {e["args"]["correlation"]: e["tid"] for e in events if e["cat"] == "cuda_runtime"}
    kernels = [event for event in events if event["cat"] == "kernel"]
    probed = list(events)
    for kernel, behind in itertools.pairwise(kernels):
        number = kernel["args"]["correlation"]
        if kernel["name"] == family.forward and threads[number] == 2:
            launch = next(
                e for e in events if e["cat"] == "cuda_runtime" and e["args"] == {
                    "correlation": behind["args"]["correlation"]}
            )  # fmt: skip
            args = {"correlation": 10_000 + number}
            probed += [
                {**launch, "ts": launch["ts"] + 3, "args": args},
                {**behind, "ts": behind["ts"] + 9, "dur": 1, "name": "void reduce_kernel<Norm>()",
                 "args": {**args, "stream": 7}},
            ]  # fmt: skip
    result = answer(probed)
    assert result.verdict == "inconclusive"
    assert "hook" in (result.reason or "")


def without_operators(name: str, kept: tuple[str, ...]) -> Result:
    written = json.loads(gzip.decompress((PUBLIC / f"{name}.json.gz").read_bytes()))
    written["traceEvents"] = [
        event
        for event in written["traceEvents"]
        if event.get("cat") in kept or event.get("name", "").startswith("ProfilerStep#")
        if event.get("cat") != "gpu_user_annotation"
    ]
    return result_of(parse(as_bytes(written), name))


KERNELS = ("kernel", "Kernel")
LAUNCHES = (*KERNELS, "cuda_runtime", "cuda_driver", "Runtime")


@pytest.mark.parametrize("kept", [KERNELS, LAUNCHES])
@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("mi300x-resnet-checkpointed", "full"),
        ("mi300x-resnet18-ddp", "none"),
        ("a100-resnet-ddp", "none"),
        ("v100-resnet50-torch1.9", "none"),
        ("v100-megatron-tp2-rank0", "none"),
        ("a100-recommender-torch1.13", "none"),
        ("rtx2080ti-linear-no-steps", "none"),
    ],
)
def test_real_traces_without_their_operators(
    name: str, verdict: str, kept: tuple[str, ...]
) -> None:
    result = without_operators(name, kept)
    assert (result.verdict, result.evidence_level) == (verdict, "kernels")


def test_steps_of_few_kernels_are_no_layers() -> None:
    """As embedding tables': two lookups a step, and several kernels for the gradient of each."""
    step = [
        "split_embedding_codegen_forward_weighted_kernel<float>()",
        "split_embedding_codegen_forward_unweighted_kernel<float>()",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
        "split_embedding_codegen_grad_indice_weights_kernel<float>()",
        "split_embedding_backward_codegen_rowwise_adagrad_weighted_kernel_cta_per_row_1<float>()",
        "split_embedding_backward_codegen_rowwise_adagrad_weighted_kernel_warp_per_row_1<float>()",
        "split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_cta_per_row_1<float>()",
        "split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_warp_per_row_1<float>()",
    ]
    for steps in (6, 7):
        events = [
            {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": 10 * place}
            | {"dur": 8, "args": {"stream": 7}}
            for place, name in enumerate(step * steps)
        ]
        for cut in (0, 3):  # a recording may begin within a step
            assert answer(events[cut:]).verdict in ("none", "inconclusive")
