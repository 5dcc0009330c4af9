"""Selective checkpoints: what keeping attention would give, and how long their operators took.

A selective checkpoint keeps the results of chosen operators and recomputes the rest (Korthikanti et
al. 2022, arXiv 2205.05198). Attention is the usual choice: its result is as large as its query,
and no other operator takes as long for so little.

Under a policy each operator is there twice in a trace: once as it is called, and once, inside, as
torch's dispatch mode calls it. A result that was kept has no second one in the recompute, so only
the inner ones are counted.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from math import prod

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.annotations import ANY_RECOMPUTE, REGION, parse_recompute, parse_region
from recompute_scan.cost.formulas import Inputs, count_call, number_type, parse_inputs
from recompute_scan.deciding import DecidedOperator, Policies, WatchedPolicy
from recompute_scan.model import step_of
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.result import Cost
from recompute_scan.trace.columns import Bool, Int64

# Ranges of the script's may stand between the two.
_LEVELS = 4
_NS_PER_MS = 1e6
# By call site and name: ns in forwards, ns in recomputes.
_Times = dict[tuple[str, str], list[float]]
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
    batches = np.unique(counts.batch[recomputed])
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


def with_times(policies: Policies, facts: RecomputeFacts, scale: float) -> Policies:
    """The policies, with the time of each operator per step.

    Unknown where two policies share a call site, or one meets two overloads of a name: a trace
    does not tell those apart.

    Args:
        policies: As they were seen.
        facts: The trace of the same run.
        scale: Factor from recorded to unprofiled times.
    """
    if facts.annotations is None or not facts.complete_count:
        return policies
    times = _times(facts)
    sites = Counter(one.site for one in policies.policies)
    factor = scale / _NS_PER_MS / facts.complete_count
    timed = tuple(
        _timed(one, times, factor) if sites[one.site] == 1 else one for one in policies.policies
    )
    return replace(policies, policies=timed)


def _timed(policy: WatchedPolicy, times: _Times, factor: float) -> WatchedPolicy:
    overloads = Counter(_called(one.name) for one in policy.operators)

    def with_time(one: DecidedOperator) -> DecidedOperator:
        name = _called(one.name)
        if overloads[name] > 1 or (policy.site, name) not in times:
            return one
        forward, again = times[policy.site, name]
        return replace(
            one, forward_ms_per_step=forward * factor, recompute_ms_per_step=again * factor
        )

    return replace(policy, operators=tuple(map(with_time, policy.operators)))


def _called(operator: str) -> str:
    """The profiler's name of an operator: ``aten::mm`` of ``aten.mm.default``."""
    return "::".join(operator.split(".")[:2])


def _times(facts: RecomputeFacts) -> _Times:
    calls = facts.calls
    sites: dict[int, str] = {}
    ranges: list[tuple[int, str, bool]] = []
    rows = np.concatenate([calls.named(re.compile(re.escape(REGION))), calls.named(ANY_RECOMPUTE)])
    rows = rows[calls.start[rows].argsort(kind="stable")]
    step = step_of(list(facts.steps), calls.start[rows])
    whole = (step >= 0) & np.append(facts.complete, False)[step]
    for row in rows.tolist():
        region = parse_region(calls.names[calls.name[row]])
        if region is not None:
            sites[region.call] = region.site
    for row in rows[whole].tolist():
        name = calls.names[calls.name[row]]
        region = parse_region(name)
        site = region.site if region is not None else sites.get(parse_recompute(name) or 0)
        if site is not None:
            ranges.append((row, site, region is None))
    # In order of rows what is in another comes after it, and takes its own calls from it.
    owner = np.full(len(calls), -1, np.int64)
    for number, (row, _, _) in sorted(enumerate(ranges), key=lambda one: one[1][0]):
        owner[row + 1 : row + 1 + int(calls.size[row])] = number
    inner = np.flatnonzero(_is_inner(facts, owner))
    took = _took(facts, inner)
    found: _Times = defaultdict(lambda: [0.0, 0.0])
    again = _within_recompute(facts)
    for row, time in zip(inner.tolist(), took.tolist(), strict=True):
        _, site, _ = ranges[owner[row]]
        found[site, calls.names[calls.name[row]]][int(again[row])] += time
    return dict(found)


def _within_recompute(facts: RecomputeFacts) -> Bool:
    return facts.calls.inside(facts.calls.named(ANY_RECOMPUTE))


def _is_inner(facts: RecomputeFacts, owner: Int64) -> Bool:
    """For each call: is it in a range, below another of its name, and the innermost of these?"""
    calls = facts.calls
    below = np.zeros(len(calls), np.bool_)
    holds = np.zeros(len(calls), np.bool_)
    above = calls.parent.astype(np.int64)
    for _ in range(_LEVELS):
        known = above >= 0
        same = known & (calls.name[np.maximum(above, 0)] == calls.name)
        same &= owner[np.maximum(above, 0)] == owner
        below |= same
        holds[above[same]] = True
        above = np.where(known, calls.parent[np.maximum(above, 0)], -1)
    return np.asarray((owner >= 0) & below & ~holds)


def _took(facts: RecomputeFacts, rows: Int64) -> Int64:
    """Ns of each call: its kernels' where the trace has a GPU, else its own on the host."""
    calls, kernels = facts.calls, facts.kernels
    if not facts.work.on_gpu:
        return np.asarray(calls.duration[rows])
    each = np.zeros(len(calls) + 1, np.int64)
    launched = kernels.launch >= 0
    np.add.at(each, kernels.launch[launched] + 1, (kernels.end - kernels.start)[launched])
    sums = each.cumsum()
    return np.asarray(sums[rows + calls.size[rows] + 1] - sums[rows])
