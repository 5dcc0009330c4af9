"""The trace that a GPU would have left of a recorded step, made from a recording of the ``rig``.

Operators, nodes, threads, their numbers and where each kernel was launched are real
(``tests/cases/device.py``). Kernels are added: names as GPUs have them, grids and blocks, one or
more streams, the device's clock behind the host's. Times of kernels depend on the operator's shapes
alone, so that a recompute takes as long as the first run.

Knows nothing of the analyser. What the step is worth without the redundant work is known from the
twin: the recording of the repaired case in the same shape.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .device import LAUNCH

Event = dict[str, Any]

US_LAUNCH = 3.0
LAG = 4.0
GAP = 0.8
# From the end of the last kernel to that of the call that waits for it.
NOTICED = 5.0


@dataclass(frozen=True)
class Shape:
    """How the device and the recording are.

    Attributes:
        name: Of the column in the table.
        kernel_us: What an ordinary kernel takes; much makes the device the limit, little the host.
        vendor: Whose names runtime calls and kernels bear.
        attention: Which attention kernels run.
        kept: What the recording holds: all, or no operators, or kernels alone.
        synchronised: Whether the host waits for the device after each step.
        communication: Whether gradients are reduced on a stream of their own.
        streams: Compute streams that the kernels of backward passes take turns on.
        marked: Whether steps have ranges.
    """

    name: str
    kernel_us: float = 400.0
    vendor: Literal["cuda", "rocm"] = "cuda"
    attention: str = "flash_2"
    kept: Literal["all", "launches", "kernels"] = "all"
    synchronised: bool = True
    communication: bool = False
    streams: int = 1
    marked: bool = True


SHAPES = (
    Shape("device-bound", kernel_us=3000.0),
    Shape("mixed"),
    Shape("launch-bound", kernel_us=4.0),
    Shape("steps-overlap", synchronised=False, attention="flash_3"),
    Shape("nccl", communication=True, attention="cudnn"),
    Shape("two-streams", streams=2, attention="efficient"),
    Shape("rocm", vendor="rocm", attention="triton"),
    Shape("launches", kept="launches"),
    Shape("kernels", kept="kernels"),
    Shape("kernels-unsynced", kept="kernels", synchronised=False, attention="flash_3"),
)

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
    "triton": ("attn_fwd.kd", ("bwd_preprocess.kd", "bwd_kernel_dk_dv.kd", "bwd_kernel_dq.kd")),
}

_ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::{}, "
    "std::array<char*, 2ul> >(int, at::native::{}, std::array<char*, 2ul>)"
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
    "cat": ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 4>()",),
    "sum": ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, sum> >()",),
}
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


@dataclass
class Shaped:
    """A document in Kineto's form, and what its maker knows of it.

    Attributes:
        document: The trace.
        step_us: What the steps took, the device's part among it, a mean.
        busy_us: Time of the kernels of compute streams in a step, a mean.
    """

    document: Event
    step_us: float
    busy_us: float


@dataclass
class _Device:
    shape: Shape
    free: dict[int, float] = field(default_factory=dict)
    kernels: list[Event] = field(default_factory=list)
    turn: int = 0

    def run(self, name: str, us: float, at: float, stream: int, args: Event) -> None:
        start = max(at + LAG, self.free.get(stream, 0.0) + GAP)
        self.free[stream] = start + us
        self.kernels.append(
            {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start}
            | {"dur": us, "args": {"device": 0, "stream": stream, **args}}
        )


def shaped(recording: Event, shape: Shape) -> Shaped:
    """The recording of a case on the ``rig``, launches among it, as on such a device."""
    given = [e for e in recording["traceEvents"] if e.get("ph") == "X"]
    events = [dict(e) for e in given if e.get("cat") in ("cpu_op", "user_annotation")]
    events.sort(key=lambda e: (e["ts"], -e["dur"]))
    steps = [e for e in events if e["name"].startswith("ProfilerStep#")]
    device = _Device(shape)
    written: list[Event] = []
    launches: list[Event] = []
    shift, correlation = 0.0, 100
    stacks: dict[Any, list[Event]] = {}
    edges = [e["ts"] + e["dur"] for e in steps]
    for event in events:
        while edges and event["ts"] >= edges[0]:
            # What follows a step waits for the device, where its end does.
            if shape.synchronised:
                wait = max(device.free.values(), default=0.0) + NOTICED - (edges[0] + shift)
                if wait > 0:
                    written.append(_runtime("cudaDeviceSynchronize", shape, steps[0],
                                            edges[0] + shift - 1.0, wait + 0.5, {}))  # fmt: skip
                    steps[0]["dur"] += wait
                    shift += wait
            edges.pop(0)
            steps.pop(0)
        stack = stacks.setdefault(event["tid"], [])
        while stack and event["ts"] >= stack[-1]["until"]:
            stack.pop()
        if event["name"] == LAUNCH:
            operator = next((e for e in reversed(stack) if e["cat"] == "cpu_op"), None)
            inside = any("evaluate_function" in e["name"] for e in stack)
            kernels = list(_kernels_of(operator, shape))
            for at, (name, us, args) in enumerate(kernels):
                correlation += 1
                took = min(US_LAUNCH, event["dur"] / (len(kernels) + 1))
                when = event["ts"] + shift + at * took
                linked = {"correlation": correlation}
                launches.append(
                    _runtime("cudaLaunchKernel", shape, event, when, 0.9 * took, linked)
                )
                device.turn += inside
                stream = 7 if not inside or shape.streams == 1 else 7 + device.turn % shape.streams
                stream = stream if shape.vendor == "cuda" else stream - 7
                device.run(name, us, when, stream, args | linked)
            if shape.communication and operator and _reduces(stack):
                correlation += 1
                linked = {"correlation": correlation}
                when = event["ts"] + shift + 0.8 * event["dur"]
                launches.append(_runtime("cudaLaunchKernelExC", shape, event, when, 1.0, linked))
                name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
                device.run(name, shape.kernel_us, when, 20, linked)
            continue
        stack.append({**event, "until": event["ts"] + event["dur"]})
        moved = {**event, "ts": event["ts"] + shift}
        moved["name"] = _renamed(event["name"])
        if event["name"].startswith("ProfilerStep#"):
            event["ts"] += 0.0
            steps = [moved if e is event else e for e in steps]
        written.append(moved)
    if shape.synchronised and steps:
        end = _end(steps[-1])
        wait = max(device.free.values(), default=0.0) + NOTICED - end
        if wait > 0:
            name, begun = "cudaDeviceSynchronize", end - 1.0
            written.append(_runtime(name, shape, steps[-1], begun, wait + 0.5, {}))
            steps[-1]["dur"] += wait
    marks = [e for e in written if e["name"].startswith("ProfilerStep#")]
    count = max(1, len(marks))
    busy = sum(k["dur"] for k in device.kernels if k["tid"] != 20) / count
    took = sum(e["dur"] for e in marks) / count
    if shape.kept != "all":
        written = marks if shape.marked and shape.kept == "launches" else []
        written += [] if shape.kept == "kernels" else launches
    else:
        written += launches
    properties = [{"id": 0, "name": "NVIDIA H100 80GB HBM3" if shape.vendor == "cuda"
                   else "AMD Instinct MI300X", "numSms": 132}]  # fmt: skip
    document = {"schemaVersion": 1, "deviceProperties": properties}
    numbered = sorted((e for e in written if "Ev Idx" in e.get("args", {})),
                      key=lambda e: int(e["args"]["Ev Idx"]))  # fmt: skip
    for number, event in enumerate(numbered):
        event["args"] = {**event["args"], "Ev Idx": number}
    return Shaped(document | {"traceEvents": written + device.kernels}, took, busy)


def _end(event: Event) -> float:
    end: float = event["ts"] + event["dur"]
    return end


def as_bytes(made: Shaped) -> bytes:
    """The document as a file holds it."""
    return json.dumps(made.document).encode()


def _runtime(name: str, shape: Shape, where: Event, ts: float, dur: float, args: Event) -> Event:
    if shape.vendor == "rocm":
        name = {"cudaLaunchKernel": "hipExtModuleLaunchKernel"}.get(
            name, name.replace("cuda", "hip")
        )
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": where["pid"],
            "tid": where["tid"], "ts": ts, "dur": dur, "args": {"cbid": 211, **args}}  # fmt: skip


def _renamed(name: str) -> str:
    return name.replace("_flash_attention_for_cpu", "_flash_attention").replace(
        "FlashAttentionForCpu", "FlashAttention"
    )


def _reduces(stack: Sequence[Event]) -> bool:
    return any("AccumulateGrad" in event["name"] for event in stack)


def _kernels_of(operator: Event | None, shape: Shape) -> Iterator[tuple[str, float, Event]]:
    """Name, time and place of each kernel that an operator launches."""
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
    us = shape.kernel_us * (1 + (size.bit_length() % 7) / 8)
    forward, backward = ATTENTION[shape.attention]
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
        if shape.vendor == "rocm":
            name = f"Cijk_Ailk_Bljk_SB_MT{64 << kind}x{numbers[-1] if numbers else 64}x32"
        yield name, us * 2, place
        return
    if plain in _NAMED:
        for name in _NAMED[plain]:
            yield name, us * 0.5, place
        return
    functor = _FUNCTORS.get(plain, f"{plain}_kernel_cuda(at::TensorIteratorBase&)")
    yield _ELEMENTWISE.format(functor, functor), us * 0.3, place
