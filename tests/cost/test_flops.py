"""Operations as torch's own counter sees the same step, and what is made of them."""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import flop_counter
from torch.utils.checkpoint import checkpoint

from recompute_scan.cost.flops import (
    _NUMBERS,
    _PEAKS,
    Inputs,
    count_call,
    count_flops,
    number_type,
    parse_inputs,
    peak_of,
)
from recompute_scan.recompute.study import study
from recompute_scan.result import Flops
from recompute_scan.trace import load
from tests.present import present
from tests.recompute.training import gradients, run, training_step
from tests.trace_builder import Call, launch, op, studied, thread

aten = torch.ops.aten
# torch counts attention on GPUs only; its own formulas serve here for the CPU's operators.
CPU_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, *_, out_shape, **__: flop_counter.sdpa_flop_count(q, k, v)
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda out, q, k, v, *_, out_shape, **__: flop_counter.sdpa_backward_flop_count(
            out, q, k, v
        )
    ),
}

Wrap = Callable[[nn.Module, Tensor], Tensor]


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = layer(x)
    return result


def reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(layer, x, use_reentrant=True)
    return result


def non_reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(layer, x, use_reentrant=False)
    return result


def doubled(layer: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(lambda y: reentrant(layer, y), x, use_reentrant=False)
    return result


class Attention(nn.Module):
    """Self-attention and a feed-forward part, with and without biases."""

    def __init__(self, kind: str = "fused") -> None:
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(24, 72, bias=False), nn.Linear(24, 24)
        self.up, self.down = nn.Linear(24, 56), nn.Linear(56, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, 3, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = self.attend(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return result

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kind == "fused":
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
        if self.kind == "baddbmm":
            flat = torch.baddbmm(
                torch.zeros(()), q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), beta=0
            )
            scores = flat.view(scores.shape)
        return scores.softmax(-1) @ v


class Convolutions(nn.Module):
    """Strides, paddings, dilations, and a transposed one that leads back to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(6, 10, 3, stride=2, padding=1, dilation=2),
            nn.ReLU(),
            nn.Conv2d(10, 8, 1),
            nn.Tanh(),
            nn.ConvTranspose2d(8, 6, 4, stride=2, padding=0),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


class Volumes(nn.Module):
    """Convolutions in one and three dimensions, the latter with ``same`` padding."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Conv1d(12, 12, 5, padding=2)
        self.cube = nn.Conv3d(3, 3, (1, 3, 3), padding="same")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.line(x).relu()
        z: Tensor = self.cube(y.view(2, 3, 4, 4, 9)).tanh()
        return z.view(x.shape)


@dataclass(frozen=True)
class Model:
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]


MODELS = {
    "attention": Model(Attention, (2, 10, 24)),
    "attention-by-products": Model(lambda: Attention("einsum"), (2, 10, 24)),
    "attention-by-baddbmm": Model(lambda: Attention("baddbmm"), (2, 10, 24)),
    "convolutions": Model(Convolutions, (2, 6, 15, 15)),
    "volumes": Model(Volumes, (2, 12, 36)),
}
WRAPS: dict[str, Wrap] = {
    "none": plain,
    "reentrant": reentrant,
    "non-reentrant": non_reentrant,
    "doubled": doubled,
}


class Training:
    """Three layers behind one another; the input of the first has no gradient."""

    def __init__(self, model: Model, wrap: Wrap, autocast: bool = False) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList(model.build() for _ in range(3))
        self.x = torch.randn(model.shape)
        self.wrap = wrap
        self.autocast = autocast
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=1e-3)
        self.step()

    def forward(self) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            # An unwrapped layer first: a reentrant checkpoint needs an input with gradients.
            x = self.layers[0](self.x)
            for layer in list(self.layers)[1:]:
                x = self.wrap(layer, x)
            loss: Tensor = x.square().mean()
            return loss

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()


def by_torch(work: Callable[[], Any]) -> int:
    with flop_counter.FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        work()
    return int(counter.get_total_flops())


def by_trace(training: Training, folder: Path) -> Flops:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        training.step()
    file = folder / "trace.json"
    profiler.export_chrome_trace(str(file))
    return present(count_flops(study(load(file)), 10.0, None))


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", MODELS)
def test_every_part_of_a_step_is_as_torch_counts_it(name: str, wrap: str, tmp_path: Path) -> None:
    training = Training(MODELS[name], WRAPS[wrap])
    forward = by_torch(training.forward)
    recomputed = by_torch(training.step)
    needed = by_torch(Training(MODELS[name], plain).step)
    flops = by_trace(training, tmp_path)
    assert flops.reason is None
    assert flops.uncounted == ()
    assert flops.forward_per_step == forward
    assert flops.backward_per_step == needed - forward
    assert flops.recompute_per_step == recomputed - needed
    if wrap == "doubled":
        # Both recomputes are the reentrant checkpoint's: its forward is run again whole.
        assert flops.redundant_per_step == (recomputed - needed) / 2
    else:
        assert flops.redundant_per_step == 0
    assert flops.hfu_over_mfu == pytest.approx(recomputed / needed)


def test_autocast_counts_the_products_in_the_type_they_run_in(tmp_path: Path) -> None:
    training = Training(MODELS["attention"], plain, autocast=True)
    flops = by_trace(training, tmp_path)
    assert flops.forward_per_step == by_torch(training.forward)
    parsed = [parse_inputs(s) for s in load(tmp_path / "trace.json").signatures]
    assert {number_type(i) for i in parsed if i} >= {"bf16", "fp32"}


def test_a_product_of_a_dtensor_that_a_recompute_only_enters_does_not_count(tmp_path: Path) -> None:
    """Early stop ends it before its local product, which has half of the shape."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh, half = init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def build() -> nn.Module:
        up, down = nn.Linear(24, 48, bias=False), nn.Linear(48, 24, bias=False)
        return parallelize_module(nn.Sequential(up, nn.Tanh(), down), mesh, half)

    try:
        flops = by_trace(Training(Model(build, (10, 24)), non_reentrant), tmp_path)
    finally:
        dist.destroy_process_group()
    product = 2 * 10 * 24 * 24
    assert (flops.forward_per_step, flops.recompute_per_step) == (3 * 2 * product, 2 * product)


def test_a_grouped_convolution_counts_what_its_groups_do_apart(tmp_path: Path) -> None:
    """torch's counter takes the weight's gradient for that of a convolution without groups."""

    class Grouped(nn.Module):
        def __init__(self, groups: int) -> None:
            super().__init__()
            self.inner = nn.Conv2d(8, 8, 3, padding=1, groups=groups)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inner(x)
            return result

    whole = by_trace(Training(Model(lambda: Grouped(1), (2, 8, 9, 9)), plain), tmp_path)
    for groups in (2, 8):
        model = Model(functools.partial(Grouped, groups), (2, 8, 9, 9))
        split = by_trace(Training(model, plain), tmp_path)
        assert split.forward_per_step == pytest.approx((whole.forward_per_step or 0) / groups)
        assert split.backward_per_step == pytest.approx((whole.backward_per_step or 0) / groups)


# -- what cannot be counted ----------------------------------------------------------------------


def shaped(name: str, dims: Sequence[Any], *inside: Call, seq: int | None = None) -> Call:
    return op(name, *inside, seq=seq, dims=list(dims))


def layer(first: int, product: Call | None = None) -> list[Call]:
    """A product and three small operators, numbered from ``first``."""
    product = product or shaped("aten::addmm", [[8], [4, 8], [8, 8]])
    calls = run(first)
    return [calls[0], replace(calls[1], inside=(product,)), *calls[2:3]]


def backward(calls: list[Call]) -> list[Call]:
    """The nodes of these operators; each runs one product of 2 by 2 matrices."""
    product = shaped("aten::mm", [[2, 2], [2, 2]])
    product = replace(product, args={**product.args, "Input type": ["float", "float"]})
    return [
        replace(one, inside=(replace(one.inside[0], inside=(product,)),))
        for one in gradients(calls)
    ]


def flops_of(calls: list[Call], **how: Any) -> Flops:
    facts = studied(thread(training_step(0, *calls, *backward(calls))))
    return present(count_flops(facts, how.pop("step_ms", 1.0), how.pop("device", None), **how))


def test_without_shapes_the_reason_is_given() -> None:
    calls = run(0, dims=None)
    flops = count_flops(studied(thread(training_step(0, *calls, *gradients(calls)))), 1.0, None)
    assert flops is not None
    assert flops.forward_per_step is None
    assert "record_shapes=True" in (flops.reason or "")


def test_without_a_complete_step_there_is_nothing_to_count() -> None:
    assert count_flops(studied(thread(training_step(0, *layer(0)))), 1.0, None) is None


def test_packed_attention_is_named_as_not_counted() -> None:
    packed = shaped("flash_attn_3::fwd", [[64, 4, 8]] * 3 + [[]] * 4 + [[5], [5]])
    flops = flops_of([*layer(0), *layer(10, packed), *layer(20)])
    assert flops.uncounted == ("flash_attn_3::fwd",)
    assert flops.forward_per_step == 2 * 2 * 4 * 8 * 8


def test_where_most_is_not_counted_nothing_is_said() -> None:
    packed = shaped("flash_attn_3::fwd", [[64, 4, 8]] * 3 + [[]] * 4 + [[5], [5]])
    flops = flops_of([*layer(0), *layer(10, op("model", *[packed] * 10))])
    assert (flops.forward_per_step, flops.hfu_over_mfu) == (None, None)
    assert "flash_attn_3::fwd" in (flops.reason or "")


@pytest.mark.parametrize(
    "dims",
    [
        [],
        [[2, 3]],
        [[2, 3], [4, 5]],
        [[2, 3], 7],
        [[2, 3], "x"],
        [[2, -3], [-3, 5]],
        [[2, 3, 4], [4, 5]],
        [[10**12, 10**12], [10**12, 10**12]],
        [[True, 3], [3, 4]],
        [[2, 3.0], [3, 4]],
        {"a": 1},
    ],
)
def test_shapes_that_make_no_sense_count_as_unknown(dims: Any) -> None:
    inputs = parse_inputs(json.dumps(dims))
    assert inputs is None or count_call("aten::mm", inputs) is None


@pytest.mark.parametrize("text", ["", "[", "[[1,2]]]", "nonsense", "[" * 100_000])
def test_signatures_that_cannot_be_read(text: str) -> None:
    assert parse_inputs(text) is None


@pytest.mark.parametrize("values", [(), ("",) * 9, ("",) * 3 + ("[0]", "[0]", "[1]", "False")])
def test_convolutions_without_their_strides_are_unknown(values: tuple[str, ...]) -> None:
    inputs = Inputs(((2, 3, 8, 8), (4, 3, 3, 3), ()), (), values)
    assert count_call("aten::convolution", inputs) is None


def test_routed_experts_count_each_token_once() -> None:
    """Formulas against one product a group: 12 tokens, 3 experts, widths 4 and 5."""
    each = 2 * 4 * 4 * 5
    forward = Inputs(((12, 4), (3, 4, 5)), (), ())
    weight_gradient = Inputs(((4, 12), (12, 5)), (), ())
    assert count_call("aten::_grouped_mm", forward) == 3 * each
    assert count_call("aten::_grouped_mm", weight_gradient) == 3 * each


def test_attention_in_either_layout_is_the_same() -> None:
    heads_first = Inputs(((2, 4, 16, 8), (2, 2, 20, 8), (2, 2, 20, 6)), (), ())
    sequence_first = Inputs(((2, 16, 4, 8), (2, 20, 2, 8), (2, 20, 2, 6), (), (), ()), (), ())
    expected = flop_counter.sdpa_flop_count(*heads_first.shapes)
    assert count_call("aten::_scaled_dot_product_flash_attention", heads_first) == expected
    for name in ("aten::_flash_attention_forward", "aten::_efficient_attention_forward"):
        assert count_call(name, sequence_first) == expected
    out = (2, 4, 16, 6)
    expected = flop_counter.sdpa_backward_flop_count(out, *heads_first.shapes)
    backward = Inputs((out, *heads_first.shapes), (), ())
    assert count_call("aten::_scaled_dot_product_cudnn_attention_backward", backward) == expected


# -- the peak ------------------------------------------------------------------------------------


def gpu_layer(first: int, kernel: str = "gemm", number: str = "c10::BFloat16") -> list[Call]:
    calls = layer(first, shaped("aten::addmm", [[8], [4, 8], [8, 8]], launch(kernel, 5.0)))
    product = calls[1].inside[0]
    typed = replace(product, args={**product.args, "Input type": [number] * 3})
    return [calls[0], replace(calls[1], inside=(typed,)), *calls[2:]]


def test_utilisation_is_time_at_the_peak_over_time_taken() -> None:
    flops = flops_of(gpu_layer(0), device="NVIDIA A100-SXM4-80GB", step_ms=2e-6)
    assert flops.forward_per_step == 2 * 4 * 8 * 8
    assert flops.backward_per_step == 3 * 2**4
    # bf16 at 312 TFLOP/s, fp32 at 19.5
    ideal_s = 2 * 4 * 8 * 8 / 312e12 + 3 * 2**4 / 19.5e12
    assert flops.hfu == pytest.approx(ideal_s / 2e-9)
    assert flops.peak_tflops == pytest.approx((512 + 48) / ideal_s / 1e12)
    assert flops.mfu == pytest.approx(flops.hfu)
    assert (flops.peak_source or "").startswith("A100")


@pytest.mark.parametrize(
    ("kernel", "tflops"),
    [  # as an H100 ran them, without and with `torch.backends.cuda.matmul.allow_tf32`
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize128x64x8_stage3_warpsize2x2x1_ffma", 67.0),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>", 67.0),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize64x128x32_warpgroupsize1x1x1", 494.5),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x64_32x6_nt_align4>", 494.5),
    ],
)
def test_32_bits_on_tensor_cores_have_their_own_peak(kernel: str, tflops: float) -> None:
    flops = flops_of(gpu_layer(0, kernel, "float"), device="NVIDIA H100 80GB HBM3")
    assert flops.peak_tflops == pytest.approx(tflops)


def test_a_given_peak_stands_above_the_table() -> None:
    given = flops_of(gpu_layer(0), device="NVIDIA A100-SXM4-80GB", peak_tflops=624.0)
    assert given.hfu == pytest.approx((512 + 48) / 624e12 / 1e-3)
    assert given.peak_tflops == pytest.approx(624.0)
    assert given.peak_source == "as given"


def test_an_unknown_device_has_no_utilisation_but_a_ratio() -> None:
    flops = flops_of(gpu_layer(0), device="Voodoo 2")
    assert (flops.mfu, flops.hfu, flops.peak_tflops, flops.peak_source) == (None,) * 4
    assert flops.hfu_over_mfu == 1


@pytest.mark.parametrize(
    ("device", "bf16"),
    [
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA A100-PG509-200", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA H800 PCIe", 756.5),
        ("NVIDIA B200", 2250.0),
        ("AMD Instinct MI300X", 1307.4),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_devices_by_the_names_that_drivers_give(device: str, bf16: float | None) -> None:
    peak = present(peak_of(device))
    assert peak.tflops.get("bf16") == bf16


@pytest.mark.parametrize(
    "device",
    [
        None,
        "",
        "Tesla K80",
        "NVIDIA A1000",
        "AMD Radeon Graphics",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
    ],
)
def test_other_devices_are_not_mistaken_for_known_ones(device: str | None) -> None:
    assert peak_of(device) is None


def test_the_table_holds_dense_figures() -> None:
    """Within a product the types stand in the known proportion of their widths."""
    for _, _, figures, source in _PEAKS:
        tflops = {kind: each for kind, each in zip(_NUMBERS, figures, strict=True) if each}
        assert source.startswith("https://")
        assert tflops["fp16"] > tflops["fp32"]
        if "fp8" in tflops:
            assert tflops["fp8"] == pytest.approx(2 * tflops["fp16"], rel=0.02)
        if "tf32" in tflops:
            assert tflops["tf32"] == pytest.approx(tflops["fp16"] / 2, rel=0.02)
