"""Floating-point operations of one operator call, from the shapes of its inputs.

A multiplication with its addition counts as two operations; what is not a matrix product, a
convolution or attention counts as nothing, as in the accounts that MFU is defined by. The formulas
are those of torch's own counter (``torch/utils/flop_counter.py``), with two differences: a grouped
convolution's backward is counted by its groups, and products of routed experts are counted at all.

* product of an m by k and a k by n matrix: 2·m·k·n
* convolution: 2·N·C_out·(C_in / groups)·(kernel)·(output positions), each of the two gradients as
  much again; a transposed convolution is counted at its input positions
* attention, forward: the two products of scores and values, 2·B·H·S_q·S_k·(D + D_v); backward:
  five products, one of which recomputes the scores inside the kernel. A causal mask or a window
  is not subtracted (Chowdhery et al. 2022, PaLM, appendix B).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from msgspec import Struct

# Beyond any call that a machine could make: shapes of a damaged trace.
_MOST = 1e21

Shape = tuple[int, ...]


class Inputs(Struct, frozen=True):
    """What a trace says about the inputs of one call.

    Attributes:
        shapes: Shape of each input, empty for what is no tensor.
        types: Type of each, as torch spells it (``c10::BFloat16``); may be empty.
        values: Text of each that is no tensor; recorded for convolutions, else empty.
    """

    shapes: tuple[Shape, ...]
    types: tuple[str, ...]
    values: tuple[str, ...]


def parse_inputs(signature: str) -> Inputs | None:
    """The inputs from a trace's signature (``Trace.signatures``); ``None`` where it has none."""
    try:
        parts = list(_json_values(signature))
    except (ValueError, RecursionError):
        return None
    if not parts:
        return None
    shapes = tuple(_shape(dims) for dims in parts[0])
    texts = [tuple(str(text) for text in part) for part in parts[1:3]]
    types, values = (*texts, (), ())[:2]
    return Inputs(shapes, types, values)


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


def has_formula(name: str) -> bool:
    """Whether calls of this name can be counted at all."""
    return name in _FORMULAS


def number_type(inputs: Inputs) -> str:
    """What the call computes in: ``bf16``, ``fp16``, ``fp32``, ``fp64``, ``fp8``; else empty."""
    for text in inputs.types:
        for pattern, short in _NUMBER_TYPES:
            if pattern.match(text):
                return short
    return ""


_NUMBER_TYPES = (
    (re.compile(r"c10::BFloat16"), "bf16"),
    (re.compile(r"c10::Half"), "fp16"),
    (re.compile(r"c10::Float8"), "fp8"),
    (re.compile(r"float"), "fp32"),
    (re.compile(r"double"), "fp64"),
)


def _json_values(text: str) -> Iterator[list[Any]]:
    decoder = json.JSONDecoder()
    position = 0
    while position < len(text):
        value, position = decoder.raw_decode(text, position)
        if not isinstance(value, list):
            raise ValueError(text[:40])  # noqa: TRY004 - one kind of error for what does not fit
        yield value


def _shape(dims: Any) -> Shape:
    if isinstance(dims, list) and all(type(size) is int and size >= 0 for size in dims):
        return tuple(dims)
    return ()


def _product(a: Shape, b: Shape) -> int:
    m, k = a
    inner, n = b
    if inner != k:
        raise ValueError(a, b)
    return 2 * m * k * n


def _batched(a: Shape, b: Shape) -> int:
    if a[0] != b[0]:
        raise ValueError(a, b)
    return a[0] * _product(a[1:], b[1:])


def _linear(inputs: Inputs) -> int:
    x, weight = inputs.shapes[:2]
    out, features = weight
    if x[-1] != features:
        raise ValueError(x, weight)
    return 2 * prod(x) * out


def _grouped(inputs: Inputs) -> int:
    """Products of routed experts: tokens in ragged groups along one dimension."""
    a, b = inputs.shapes[:2]
    if len(a) == len(b) == 3:
        return _batched(a, b)
    if a[-1] != b[-2]:
        raise ValueError(a, b)
    return 2 * a[-2] * a[-1] * b[-1]


def _convolution(x: Shape, weight: Shape, out: Shape, transposed: bool) -> int:
    positions = prod((x if transposed else out)[2:])
    return 2 * x[0] * positions * prod(weight)


def _convolution_forward(inputs: Inputs) -> int:
    x, weight = inputs.shapes[:2]
    if len(x) == len(weight) - 1:
        x = (1, *x)
    _check_convolution(x, weight)
    stride, padding, dilation = (_numbers(text, len(x) - 2) for text in inputs.values[3:6])
    transposed = inputs.values[6] == "True"
    sizes = zip(x[2:], weight[2:], stride, padding, dilation, strict=True)
    out = tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)
    if not transposed and min(out, default=0) < 0:
        raise ValueError(out)
    return _convolution(x, weight, (*x[:1], weight[0], *out), transposed)


def _convolution_backward(inputs: Inputs) -> int:
    gradient, x, weight = inputs.shapes[:3]
    _check_convolution(x, weight)
    mask = json.loads(inputs.values[10].lower())
    if not isinstance(mask, list):
        raise ValueError(mask)  # noqa: TRY004
    transposed = inputs.values[7] == "True"
    return sum(map(bool, mask[:2])) * _convolution(x, weight, gradient, transposed)


def _check_convolution(x: Shape, weight: Shape) -> None:
    if len(x) < 3 or len(x) != len(weight):
        raise ValueError(x, weight)


def _attention(q: Shape, k: Shape, v: Shape) -> tuple[int, int]:
    """Operations of the product with q and k's width, and of the one with v's; b, h, s, d."""
    batch, heads, queries, width = q
    if (k[0], k[3], k[2]) != (batch, width, v[2]):
        raise ValueError(q, k, v)
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
    """The same for inputs b, s, h, d. Lengths of packed sequences are in no trace.

    Args:
        formula: For b, h, s, d.
        lengths: Place of the input that says where packed sequences begin.
    """

    def counted(inputs: Inputs) -> int:
        if any(inputs.shapes[lengths]):
            raise ValueError(inputs.shapes)
        turned = tuple(
            (s[0], s[2], s[1], s[3]) if len(s) == 4 else s for s in inputs.shapes[:lengths]
        )
        return formula(Inputs(turned, (), ()))

    return counted


def _plain(first: int, formula: Callable[[Shape, Shape], int]) -> Callable[[Inputs], int]:
    """A product of two inputs, of which ``first`` is the place of the one on the left."""
    return lambda inputs: formula(*inputs.shapes[first : first + 2])


def _numbers(text: str, length: int) -> list[int]:
    numbers = json.loads(text)
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise ValueError(text)
    return numbers * length if len(numbers) == 1 else numbers


_SDPA = "aten::_scaled_dot_product_{}_attention{}"
_FORMULAS: dict[str, Callable[[Inputs], int]] = {
    "aten::mm": _plain(0, _product),
    "aten::_int_mm": _plain(0, _product),
    "aten::_scaled_mm": _plain(0, _product),
    "aten::addmm": _plain(1, _product),
    "aten::_addmm_activation": _plain(1, _product),
    "aten::bmm": _plain(0, _batched),
    "aten::baddbmm": _plain(1, _batched),
    # Counted where the product inside it is none of the above (oneDNN).
    "aten::linear": _linear,
    "mkldnn::_linear_pointwise": _linear,
    "aten::_grouped_mm": _grouped,
    "aten::_scaled_grouped_mm": _grouped,
    "aten::convolution": _convolution_forward,
    "aten::convolution_backward": _convolution_backward,
    **{
        _SDPA.format(kind, end) + backward: formula
        for kind, end in (
            *(("flash", ""), ("efficient", ""), ("cudnn", "")),
            *(("flash", "_for_cpu"), ("fused", "_overrideable")),
        )
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
