"""What keeping the results of attention would give and take, layer by layer.

A selective checkpoint keeps the results of chosen operators and recomputes the rest (Korthikanti et
al. 2022, arXiv 2205.05198). Attention is the usual choice: its result is as large as its query,
and no other operator takes as long for so little.
"""

from __future__ import annotations

from math import prod

import numpy as np
from msgspec import Struct

from recompute_scan.arrays import distinct
from recompute_scan.cost.formulas import Inputs, count_call, number_type, parse_inputs
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.result import Cost

_ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "fp32": 4, "fp64": 8}
# The logarithms of the sums of exponents, one a row of scores, in 32 bits.
_ROW_BYTES = 4


class KeptAttention(Struct, frozen=True):
    """The choice to keep the results of attention.

    Attributes:
        operators: Names of the operators, as the profiler has them.
        calls: Attention calls that are recomputed in one micro-batch.
        saving_ms: What a step would gain.
        added_bytes: What one micro-batch would hold beside what it holds today.
    """

    operators: tuple[str, ...]
    calls: int
    saving_ms: float
    added_bytes: int


def keep_attention(facts: RecomputeFacts, cost: Cost) -> KeptAttention | None:
    """The choice for this trace; ``None`` where no attention is recomputed that could be kept.

    Args:
        facts: What ran again.
        cost: Price of the recomputes.
    """
    counts = facts.counts
    recomputed = np.flatnonzero(counts.counted & (counts.runs > 0))
    needed = (counts.again - counts.redundant)[counts.counted].sum()
    if not len(recomputed) or needed <= 0:
        return None
    time, size, calls, operators = 0.0, 0, 0, set()
    batches = distinct(counts.batch[recomputed])
    for place in recomputed.tolist():
        found = _attention(facts, int(counts.rows[place]))
        if found is None:
            continue
        operators.add(found[0])
        time += float(counts.again[place] - counts.redundant[place])
        if counts.batch[place] == batches[0]:
            calls += 1
            size += found[1]
    if not operators:
        return None
    return KeptAttention(
        operators=tuple(sorted(operators)),
        calls=calls,
        saving_ms=cost.breakdown.recompute * time / float(needed),
        added_bytes=size,
    )


def _attention(facts: RecomputeFacts, row: int) -> tuple[str, int] | None:
    """Name of the outermost attention operator with known shapes in a call, bytes it returns."""
    calls = facts.calls
    if words.family_of(calls.names[calls.name[row]])[1] != "attention":
        return None
    for inner in range(row, row + 1 + int(calls.size[row])):
        name = calls.names[calls.name[inner]]
        inputs = parse_inputs(facts.trace.signatures[calls.dims[inner]])
        if inputs and words.family_of(name)[1] == "attention" and count_call(name, inputs):
            return name, _result_bytes(inputs)
    return None


def _result_bytes(inputs: Inputs) -> int:
    query, _, value = inputs.shapes[:3]
    rows = prod(query[:-1])
    return rows * (value[-1] * _ITEM_BYTES.get(number_type(inputs), 4) + _ROW_BYTES)
