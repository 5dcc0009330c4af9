"""Operations of each call, MFU and HFU, and the peaks of GPUs.

MFU counts the forward pass and the backward pass, HFU all that ran, recomputes included
(Chowdhery et al. 2022, arXiv 2204.02311, appendix B; Korthikanti et al. 2022, arXiv 2205.05198).

Operations come from the shapes of a call's inputs; a multiplication with its addition counts as
two. Only matrix products, convolutions and attention count, as in the definition of MFU. The
formulas come from torch's own counter (``torch/utils/flop_counter.py``), with two differences: a
grouped convolution's backward is counted by its groups, and products of routed experts are counted.

* product of an m by k and a k by n matrix: 2·m·k·n
* convolution: 2·N·C_out·(C_in / groups)·(kernel)·(output positions), each of the two gradients as
  much again; a transposed convolution is counted at its input positions
* attention, forward: the two products of scores and values, 2·B·H·S_q·S_k·(D + D_v); backward:
  five products, including one that recomputes the scores inside the kernel. A causal mask or a
  window is not subtracted (Chowdhery et al. 2022, PaLM, appendix B).

Peaks are dense, at the boost clock, per device: figures that makers print with structured sparsity
are halved. Where a name stands for several products (``NVIDIA H100 80GB HBM3`` is the SXM module),
the form that carries that name is meant.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.roles import Role
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.result import Flops
from recompute_scan.trace.columns import Bool, Float64, Int64, Kind, Trace

# Beyond any call that a machine could make: shapes of a damaged trace.
_MOST = 1e21

Shape = tuple[int, ...]


class Inputs(Struct, frozen=True):
    """The inputs of one call: the shape of each, empty for what is no tensor; its type, as torch
    spells it, if recorded; and for convolutions the text of each that is no tensor.
    """

    shapes: tuple[Shape, ...]
    types: tuple[str, ...]
    values: tuple[str, ...]


def parse_inputs(signature: str) -> Inputs | None:
    """The inputs from a trace's signature (``Trace.signatures``); ``None`` where it has none."""
    try:
        dims, *texts = json_lists(signature)
    except (ValueError, RecursionError):
        return None
    types, values, *_ = *(tuple(map(str, text)) for text in texts), (), ()
    return Inputs(tuple(map(_shape, dims)), types, values)


def count_call(name: str, inputs: Inputs) -> float | None:
    """Operations of one call; ``None`` where there is no formula, or it cannot be applied."""
    formula = _FORMULAS.get(name)
    if formula is None:
        return None
    try:
        flops = formula(inputs)
    except (ValueError, TypeError, IndexError, ZeroDivisionError):
        return None
    return float(flops) if 0 <= flops < _MOST else None


def number_type(inputs: Inputs) -> str:
    """The number type of the call: ``bf16``, ``fp16``, ``fp32``, ``fp64``, ``fp8``; else empty."""
    kinds = _NUMBER_TYPES.items()
    found = (kind for text in inputs.types for name, kind in kinds if text.startswith(name))
    return next(found, "")


_NUMBER_TYPES = {
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "c10::Float8": "fp8",
    "float": "fp32",
    "double": "fp64",
}


def json_lists(text: str) -> Iterator[list[Any]]:
    """The lists of a signature.

    Raises:
        ValueError: It has something else.
        RecursionError: It is nested too deeply.
    """
    decoder = json.JSONDecoder()
    position = 0
    while position < len(text):
        value, position = decoder.raw_decode(text, position)
        _require(isinstance(value, list))
        yield value


def _shape(dims: Any) -> Shape:
    sizes = isinstance(dims, list) and all(type(size) is int and size >= 0 for size in dims)
    return tuple(dims) if sizes else ()


def _require(fits: bool) -> None:
    """No operation has such inputs, where they do not fit: the trace is damaged."""
    if not fits:
        raise ValueError


def _product(a: Shape, b: Shape) -> int:
    m, k = a
    inner, n = b
    _require(inner == k)
    return 2 * m * k * n


def _batched(a: Shape, b: Shape) -> int:
    _require(a[0] == b[0])
    return a[0] * _product(a[1:], b[1:])


def _linear(inputs: Inputs) -> int:
    x, weight = inputs.shapes[:2]
    out, features = weight
    _require(x[-1] == features)
    return 2 * prod(x) * out


def _grouped(inputs: Inputs) -> int:
    """Products of routed experts: tokens in ragged groups along one dimension."""
    a, b = inputs.shapes[:2]
    if len(a) == len(b) == 3:
        return _batched(a, b)
    _require(a[-1] == b[-2])
    return 2 * a[-2] * a[-1] * b[-1]


def _convolution(x: Shape, weight: Shape, out: Shape, transposed: bool) -> int:
    positions = prod((x if transposed else out)[2:])
    return 2 * x[0] * positions * prod(weight)


def _convolution_forward(inputs: Inputs) -> int:
    x, weight = inputs.shapes[:2]
    if len(x) == len(weight) - 1:
        x = (1, *x)
    _require(3 <= len(x) == len(weight))
    stride, padding, dilation = (_numbers(text, len(x) - 2) for text in inputs.values[3:6])
    transposed = inputs.values[6] == "True"
    sizes = zip(x[2:], weight[2:], stride, padding, dilation, strict=True)
    out = tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)
    _require(transposed or min(out, default=0) >= 0)
    return _convolution(x, weight, (*x[:1], weight[0], *out), transposed)


def _convolution_backward(inputs: Inputs) -> int:
    gradient, x, weight = inputs.shapes[:3]
    _require(3 <= len(x) == len(weight))
    mask = json.loads(inputs.values[10].lower())
    _require(isinstance(mask, list))
    transposed = inputs.values[7] == "True"
    return sum(map(bool, mask[:2])) * _convolution(x, weight, gradient, transposed)


def _attention(q: Shape, k: Shape, v: Shape) -> tuple[int, int]:
    """Operations of the product with q and k's width, and of the one with v's; b, h, s, d."""
    batch, heads, queries, width = q
    _require((k[0], k[3], k[2]) == (batch, width, v[2]))
    scores = 2 * batch * heads * queries * k[2]
    return scores * width, scores * v[3]


def _attention_forward(inputs: Inputs) -> int:
    q, k, v = inputs.shapes[:3]
    return sum(_attention(q, k, v))


def _attention_backward(inputs: Inputs) -> int:
    q, k, v = inputs.shapes[1:4]
    by_width, by_value = _attention(q, k, v)
    return 3 * by_width + 2 * by_value


def _sequence_first(formula: Callable[[Inputs], int], lengths: int) -> Callable[[Inputs], int]:
    """The same for inputs b, s, h, d. Lengths of packed sequences, which begin where the input in
    place ``lengths`` says, are in no trace.
    """

    def counted(inputs: Inputs) -> int:
        _require(not any(inputs.shapes[lengths]))
        turned = tuple(
            (s[0], s[2], s[1], s[3]) if len(s) == 4 else s for s in inputs.shapes[:lengths]
        )
        return formula(Inputs(turned, (), ()))

    return counted


def _plain(first: int, formula: Callable[[Shape, Shape], int]) -> Callable[[Inputs], int]:
    """A product of two inputs, the left one in place ``first``."""
    return lambda inputs: formula(*inputs.shapes[first : first + 2])


def _numbers(text: str, length: int) -> list[int]:
    numbers = json.loads(text)
    _require(isinstance(numbers, list) and all(type(number) is int for number in numbers))
    return [*numbers] * length if len(numbers) == 1 else [*numbers]


_SDPA = (
    "flash_attention efficient_attention cudnn_attention flash_attention_for_cpu "
    "fused_attention_overrideable"
).split()
_FORMULAS: dict[str, Callable[[Inputs], int]] = {
    "aten::mm": _plain(0, _product),
    "aten::_int_mm": _plain(0, _product),
    "aten::_scaled_mm": _plain(0, _product),
    "aten::addmm": _plain(1, _product),
    "aten::_addmm_activation": _plain(1, _product),
    "aten::bmm": _plain(0, _batched),
    "aten::baddbmm": _plain(1, _batched),
    # Counted where the product inside it is not in this table (oneDNN).
    "aten::linear": _linear,
    "mkldnn::_linear_pointwise": _linear,
    "aten::_grouped_mm": _grouped,
    "aten::_scaled_grouped_mm": _grouped,
    "aten::convolution": _convolution_forward,
    "aten::convolution_backward": _convolution_backward,
    **{
        f"aten::_scaled_dot_product_{kind}{backward}": formula
        for kind in _SDPA
        for backward, formula in (("", _attention_forward), ("_backward", _attention_backward))
    },
    "aten::_flash_attention_forward": _sequence_first(_attention_forward, 3),
    "aten::_flash_attention_backward": _sequence_first(_attention_backward, 6),
    "aten::_efficient_attention_forward": _sequence_first(_attention_forward, 4),
    "aten::_efficient_attention_backward": _sequence_first(_attention_backward, 6),
    # Dao's own operators, versions 2 and 3
    "flash_attn::_flash_attn_forward": _sequence_first(_attention_forward, 3),
    "flash_attn::_flash_attn_backward": _sequence_first(_attention_backward, 6),
    "flash_attn_3::fwd": _sequence_first(_attention_forward, 7),
    "flash_attn_3::bwd": _sequence_first(_attention_backward, 9),
}


class Machine(Struct, frozen=True):
    """The device as the user gives it. It counts before traces and tables.

    Attributes:
        peak_tflops: Peak arithmetic of one device, TFLOP/s.
        memory_bytes: Memory of one device, instead of the size in the trace.
    """

    peak_tflops: float | None = None
    memory_bytes: int | None = None


UNKNOWN_MACHINE = Machine()


def device_name(trace: Trace, environment: Mapping[str, str]) -> str | None:
    """Name of the GPU, of the run record, or of the trace, which lists every GPU of the host.

    ``None`` where it is unknown, or the host has different ones.
    """
    if name := environment.get("device_name"):
        return name
    devices = trace.metadata.get("deviceProperties")
    if not isinstance(devices, list):
        return None
    names = {device.get("name") for device in devices if isinstance(device, dict)}
    name = names.pop() if len(names) == 1 else None
    return name if isinstance(name, str) else None


def capacity(trace: Trace, device: int) -> int | None:
    """Memory of the GPU with this number in bytes; ``None`` where the trace lacks it."""
    devices = trace.metadata.get("deviceProperties")
    if not isinstance(devices, list) or not 0 <= device < len(devices):
        return None
    size = devices[device].get("totalGlobalMem") if isinstance(devices[device], dict) else None
    return size if isinstance(size, int) and 0 < size < 2**62 else None


NV = "https://www.nvidia.com/en-us/data-center/"
GRACE = NV + "grace-hopper-superchip/"
GA102 = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
AMD = "https://www.amd.com/en/products/accelerators/instinct/"
MI300 = AMD + "mi300/"
MI250X = AMD + "mi200/mi250x.html"

_SLICE = re.compile(r"\bMIG\b")
_NUMBERS = ("bf16", "fp16", "fp32", "tf32", "fp8", "fp64")
_NO = None  # The product does not support the type.
# A word of device names, the product, TFLOP/s for each of `_NUMBERS` and the page that prints them.
# The first word found in a name counts. Products of 16 bits are added up in 32 bits. An MI250X is
# two devices; its row has the figures of one.
_PEAKS: tuple[tuple[str, str, tuple[float | None, ...], str], ...] = (
    (r"GB200\b", "GB200", (2500.0, 2500.0, 80.0, 1250.0, 5000.0, 40.0), NV + "gb200-nvl72/"),
    (r"B300\b", "B300", (2250.0, 2250.0, 75.0, 1125.0, 4500.0, 1.25), NV + "hgx/"),
    (r"B200\b", "B200", (2250.0, 2250.0, 75.0, 1125.0, 4500.0, 37.0), NV + "hgx/"),
    (r"H200 NVL\b", "H200 NVL", (835.5, 835.5, 60.0, 417.5, 1670.5, 60.0), NV + "h200/"),
    (r"GH200\b", "GH200", (989.5, 989.5, 67.0, 494.5, 1979.0, 67.0), GRACE),
    (r"H200\b", "H200 SXM", (989.5, 989.5, 67.0, 494.5, 1979.0, 67.0), NV + "h200/"),
    (r"H100 NVL\b", "H100 NVL", (835.5, 835.5, 60.0, 417.5, 1670.5, 60.0), NV + "h100/"),
    (r"(H100|H800) PCIe\b", "H100 PCIe", (756.5, 756.5, 51.0, 378.0, 1513.0, 51.0), NV + "h100/"),
    (r"(H100|H800)\b", "H100 SXM", (989.5, 989.5, 67.0, 494.5, 1979.0, 67.0), NV + "h100/"),
    (r"(A100|A800)\b", "A100", (312.0, 312.0, 19.5, 156.0, _NO, 19.5), NV + "a100/"),
    (r"A40\b", "A40", (149.7, 149.7, 37.4, 74.8, _NO, _NO), NV + "a40/"),
    (r"A30\b", "A30", (165.0, 165.0, 10.3, 82.0, _NO, 10.3), NV + "products/a30-gpu/"),
    (r"A10\b", "A10", (125.0, 125.0, 31.2, 62.5, _NO, _NO), NV + "products/a10-gpu/"),
    (r"L40S\b", "L40S", (362.05, 362.05, 91.6, 183.0, 733.0, _NO), NV + "l40s/"),
    (r"L4\b", "L4", (121.0, 121.0, 30.3, 60.0, 242.5, _NO), NV + "l4/"),
    (r"V100S", "V100S", (_NO, 130.0, 16.4, _NO, _NO, 8.2), NV + "v100/"),
    (r"V100-PCIE", "V100 PCIe", (_NO, 112.0, 14.0, _NO, _NO, 7.0), NV + "v100/"),
    (r"V100-SXM", "V100 SXM2", (_NO, 125.0, 15.7, _NO, _NO, 7.8), NV + "v100/"),
    (r"T4\b", "T4", (_NO, 65.0, 8.1, _NO, _NO, _NO), NV + "tesla-t4/"),
    (r"RTX 4090\b", "RTX 4090", (165.2, 165.2, 82.6, 82.6, 330.3, _NO), ADA),
    (r"RTX 3090\b(?! Ti)", "RTX 3090", (71.0, 71.0, 35.6, 35.6, _NO, _NO), GA102),
    (r"MI355X\b", "MI355X", (2516.6, 2516.6, 157.3, _NO, 5033.2, 78.6), AMD + "mi350/mi355x.html"),
    (r"MI350X\b", "MI350X", (2306.9, 2306.9, 144.2, _NO, 4613.7, 72.1), AMD + "mi350/mi350x.html"),
    (r"MI325X\b", "MI325X", (1307.4, 1307.4, 163.4, 653.7, 2614.9, 163.4), MI300 + "mi325x.html"),
    (r"MI300X\b", "MI300X", (1307.4, 1307.4, 163.4, 653.7, 2614.9, 163.4), MI300 + "mi300x.html"),
    (r"MI300A\b", "MI300A", (980.6, 980.6, 122.6, 490.3, 1961.2, 122.6), MI300 + "mi300a.html"),
    (r"MI250X", "MI250X, one of two dies", (191.5, 191.5, 47.9, _NO, _NO, 47.9), MI250X),
)


class Peak(Struct, frozen=True):
    """One product's TFLOP/s by number type, for the types that it supports, and their source."""

    name: str
    tflops: Mapping[str, float]
    source: str


def peak_of(device: str | None) -> Peak | None:
    """The peak of a GPU by its name as drivers give it.

    ``None`` for an unknown GPU, and for a slice (MIG), which has only some of the multiprocessors.
    """
    if not device or _SLICE.search(device):
        return None
    for pattern, name, figures, source in _PEAKS:
        if re.search(rf"\b{pattern}", device):
            known = zip(_NUMBERS, figures, strict=True)
            return Peak(name, {kind: value for kind, value in known if value is not None}, source)
    return None


# Where more than this share of the matrix products, convolutions and attention cannot be counted,
# what is left says nothing.
MOST_UNCOUNTED = 0.5
_MOST_NAMED = 8


def count_flops(
    facts: RecomputeFacts,
    step_ms: float | None,
    device: str | None,
    peak_tflops: float | None = None,
) -> Flops | None:
    """The arithmetic of one step, averaged over the complete ones; ``None`` without any.

    A given peak is for every type of number, and counts before the one known of the device.
    """
    if not facts.complete_count:
        return None
    if len(facts.trace.signatures) < 2:
        return Flops(reason="The trace has no input shapes: record it with record_shapes=True.")
    rows, flops, types, left_out = _count(facts)
    heavy = len(rows) + left_out.total()
    if not heavy:
        return Flops(
            reason="No matrix product, convolution or attention ran in the recorded steps."
        )
    uncounted = tuple(name for name, _ in left_out.most_common(_MOST_NAMED))
    if left_out.total() > MOST_UNCOUNTED * heavy or not flops.sum():
        named = ", ".join(uncounted)
        return Flops(
            uncounted=uncounted,
            reason=f"The trace does not say enough of most costly operators: {named}.",
        )
    parts = _parts(facts, rows)
    forward, backward, first, redundant = (
        float(flops[part].sum()) / facts.complete_count for part in parts
    )
    model, whole = forward + backward, forward + backward + first + redundant
    known = None if peak_tflops else peak_of(device)
    ideal_ms = _ideal_ms(facts, flops, types, np.logical_or.reduce(parts), known, peak_tflops)
    # Without a verdict, some of the backward work may be recomputes.
    split = facts.judgement.verdict != "inconclusive"
    # Time at the peak over time taken, for numbers of all types together.
    hfu = ideal_ms / step_ms if ideal_ms and step_ms else None
    peak = whole / ideal_ms / 1e9 if hfu and ideal_ms else None
    source = f"{known.name}, dense: {known.source}" if known else "as given"
    return Flops(
        forward_per_step=forward,
        backward_per_step=backward,
        recompute_per_step=first + redundant,
        redundant_per_step=redundant,
        hfu_over_mfu=whole / model if model and split else None,
        mfu=hfu * model / whole if hfu and split else None,
        hfu=hfu,
        peak_tflops=peak,
        peak_source=source if peak else None,
        uncounted=uncounted,
        reason=None if split else facts.judgement.reason,
    )


def _count(facts: RecomputeFacts) -> tuple[Int64, Float64, npt.NDArray[np.str_], Counter[str]]:
    """Rows of the calls of the complete steps with arithmetic that counts, each piece of work once;
    their operations, the type that each computes in, and the names of calls that could not be
    counted.

    Operators call each other (``linear`` calls ``addmm``): the innermost one that has a formula
    counts. Those of a recompute that were entered but did not run do not.
    """
    calls, trace, alignment = facts.calls, facts.trace, facts.alignment
    costly = calls.where(lambda name: name in _FORMULAS or _is_heavy(name))
    costly &= ~np.isin(facts.structure.top, alignment.again[~alignment.ran])
    rows = np.flatnonzero(costly & (calls.kind == Kind.OP))
    outside = facts.structure.role[rows] != Role.BACKWARD
    rows = rows[outside & facts.in_whole_step(rows)]
    shapes = int(calls.dims.max(initial=0)) + 1
    code = calls.name[rows].astype(np.int64) * shapes + calls.dims[rows]
    pairs, which = np.unique(code, return_inverse=True)
    flops, types = [], []
    for name, dims in (divmod(pair, shapes) for pair in pairs.tolist()):
        inputs = parse_inputs(trace.signatures[dims])
        known = count_call(calls.names[name], inputs) if inputs else None
        flops.append(np.nan if known is None else known)
        types.append(number_type(inputs) if inputs else "")
    value = np.array(flops, np.float64)[which]
    can = np.isfinite(value)
    inner = _innermost(facts, rows, can)
    again = np.logical_or(*_parts(facts, rows)[2:])
    # Elsewhere it holds another, as DTensor's do: the recompute stopped in it.
    entered = np.isin(which, which[can & ~inner]) & ~np.isin(which, which[inner & ~again])
    inner &= ~(again & entered)
    # Calls that hold one that counts, or are in one, are counted with it.
    counted = np.zeros(len(calls), np.bool_)
    counted[rows[inner]] = True
    alone = ~can & (calls.holding(counted, rows) == 0) & ~calls.within(rows[inner])[rows]
    alone[alone] = _innermost(facts, rows[alone], np.ones(int(alone.sum()), np.bool_))
    left_out = Counter(calls.names[code] for code in calls.name[rows[alone]])
    return rows[inner], value[inner], np.array(types, np.str_)[which[inner]], left_out


def _is_heavy(name: str) -> bool:
    """Does an operator of this name do work that should be counted?"""
    if "triton_" in name:
        # Inductor names its kernels after all that went into them; templates are products.
        return "triton_tem_" in name
    left_out = "math" if name.startswith("aten::") else "Backward"
    return vocabulary.family_of(name)[1] == "attention" and left_out not in name


def _innermost(facts: RecomputeFacts, rows: Int64, can: Bool) -> Bool:
    """Which of these rows can be counted and hold no other that can."""
    counted = np.zeros(len(facts.calls), np.bool_)
    counted[rows[can]] = True
    return np.asarray(can & (facts.calls.holding(counted, rows) == 0))


def _parts(facts: RecomputeFacts, rows: Int64) -> tuple[Bool, Bool, Bool, Bool]:
    """Which calls are forward work, backward work, a first recompute, and a further one."""
    structure = facts.structure
    top = structure.top[rows]
    recomputed = np.where(top >= 0, facts.turns[np.maximum(top, 0)], 0)
    optimizer = (top >= 0) & (structure.role[np.maximum(top, 0)] == Role.OPTIMIZER)
    model = (recomputed == 0) & ~optimizer
    backward = structure.engine[rows] >= 0
    return model & ~backward, model & backward, recomputed == 1, recomputed == 2


def _ideal_ms(
    facts: RecomputeFacts,
    flops: Float64,
    types: npt.NDArray[np.str_],
    inside: Bool,
    peak: Peak | None,
    given_tflops: float | None,
) -> float | None:
    """Time that a step's arithmetic takes at the peak; ``None`` where the peak is not known."""
    if not given_tflops and (peak is None or not facts.work.on_gpu):
        return None
    total = 0.0
    for kind in np.unique(types):
        at = given_tflops
        if peak is not None:
            fast = kind == "fp32" and any(map(_ON_TENSOR_CORES.search, facts.trace.names))
            at = peak.tflops.get("tf32" if fast else str(kind))
        if at is None:
            return None
        total += float(flops[(types == kind) & inside].sum()) / at / 1e9
    return total / facts.complete_count


# CUTLASS's instruction of 16 by 8 by 8 takes TF32 where the operator's inputs have 32 bits.
_ON_TENSOR_CORES = re.compile(r"tf32|tensorop_s1688gemm")
