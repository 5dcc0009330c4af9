"""Memory that checkpoints save, and the memory that is left.

A recompute makes again what its checkpoint did not keep, and keeps it for the backward pass that
follows at once. So what the device has more at the end of a recompute than at its beginning is what
the checkpoint saves between the forward pass and the recompute. A reentrant recompute holds its
region's result too, which the next region keeps in any case: there the figure is too high by it.

The choice of regions to stop checkpointing is a 0-1 program as in ``plan``
(:mod:`recompute_scan.cost.arrangement`): at every moment what is allocated today, and what regions
without a checkpoint hold on top, must fit.

A selective checkpoint keeps the results of chosen operators and recomputes the rest (Korthikanti et
al. 2022, arXiv 2205.05198). Attention is the usual choice: its result is as large as its query,
and no other operator takes as long for so little. Under a policy each operator is there twice in a
trace: once as it is called, and once, inside, as torch's dispatch mode calls it. A result that was
kept has no second one in the recompute, so only the inner ones are counted.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import prod

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple, replace

from recompute_scan.annotations import ANY_RECOMPUTE, REGION, parse_recompute, parse_region
from recompute_scan.cost.arrangement import KEEP, Arrangements, Condition, Moment
from recompute_scan.cost.flops import Machine, capacity, count_call, number_type, parse_inputs
from recompute_scan.cost.phases import tensors_of
from recompute_scan.cost.reruns import saved_by, saves_result
from recompute_scan.numpy_tools import median
from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.boundaries import innermost, same_boundary
from recompute_scan.recompute.layers import Block
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.result import Cost, Memory, MemoryPlan, Region, RegionMemory
from recompute_scan.result.fidelity import DecidedOperator, Policies, WatchedPolicy
from recompute_scan.result.run_record import Candidate
from recompute_scan.trace.allocations import Allocations
from recompute_scan.trace.calls import Calls
from recompute_scan.trace.columns import NS_PER_MS, Bool, Int32, Int64, Trace


class Held(Struct, frozen=True):
    """The memory that one run of a region would hold without its checkpoint: bytes, from the end of
    its forward run to the start of its recompute, ns, from which on it holds them today too.
    """

    layer: int
    size: int
    start: int
    end: int


class Levels(Struct, frozen=True):
    """How many bytes higher the peak is without one of two levels of checkpoints, at least 0.

    With both, a backward pass holds the inputs of all outer checkpoints, the inputs of the inner
    ones in one outer checkpoint, and what one inner block saves. Without the inner ones it holds
    what all blocks in one outer checkpoint save; without the outer ones, the inputs of all inner
    ones.
    """

    without_inner: int
    without_outer: int


class Footprint(Struct, frozen=True):
    """The memory of one device over the recorded steps.

    Attributes:
        device: Number of the GPU, -1 for the host.
        ts: When it changed, ns, ascending.
        allocated: Bytes that were allocated from then on; on the host beyond those when
            recording began.
        peak_reserved: Most that torch held of the device, bytes; ``None`` where unknown.
        held: All checkpointed runs.
        modules: Name of each layer's module, ``None`` where not known.
    """

    device: int
    ts: Int64
    allocated: Int64
    peak_reserved: int | None
    held: tuple[Held, ...]
    modules: tuple[str | None, ...]

    @property
    def peak_allocated(self) -> int:
        """Most that was allocated at once, bytes."""
        return int(self.allocated.max(initial=0))

    def saved(self, layer: int) -> int | None:
        """Bytes that the layer's checkpoint saves in one micro-batch; the median of all."""
        sizes = [held.size for held in self.held if held.layer == layer]
        return int(median(sizes)) if sizes else None


def measure_memory(facts: RecomputeFacts, allocations: Allocations) -> Footprint:
    """The footprint of the device that the regions' tensors lie on; some have to be allocated."""
    devices, places = np.unique(allocations.device, return_inverse=True)
    traffic = np.bincount(places, weights=np.abs(allocations.size).astype(np.float64))
    traffic[devices < 0] *= (devices >= 0).sum() == 0  # a GPU, where one is in use
    device = int(devices[np.argmax(traffic)])
    mine = allocations.device == device
    ts, size = allocations.ts[mine], allocations.size[mine]
    allocated = allocations.allocated[mine]
    if device < 0 or (allocated < 0).any():
        # The host's total goes on over all recordings of a process, with gaps between them.
        allocated = size.cumsum()
    most = int(allocations.reserved[mine].max(initial=-1)) if device >= 0 else -1
    layers = facts.layers
    total = np.concatenate(([0], size.cumsum()))
    every = ((layer, block) for layer, blocks in enumerate(layers) for block in blocks)
    held = (_held(facts, block, layer, ts, total) for layer, block in every)
    return Footprint(
        device=device,
        ts=ts,
        allocated=allocated,
        peak_reserved=most if most > 0 else None,
        held=tuple(filter(None, held)),
        modules=tuple(blocks[0].span.module for blocks in layers),
    )


def levels_of(facts: RecomputeFacts) -> Levels | None:
    """The memory that either of two levels of checkpoints saves; ``None`` where unknown.

    Worked out of the shapes that the trace has: a block's input is the first tensor of its first
    operator, and a block saves, for each operator that saves anything, as much as its first tensor
    takes, what two operators save once. Unknown without annotations or shapes, without a second
    level, and with more than two.
    """
    if facts.annotations is None:
        return None
    counts, structure, alignment = facts.counts, facts.structure, facts.alignment
    spans = {(call.first, call.last) for call in facts.annotations.calls}
    # A run without gradients saves nothing, and has no annotations of the calls inside: the
    # recompute shows them.
    rows = counts.rows.copy()
    for recompute, begin in zip(alignment.recomputes, alignment.begins.tolist(), strict=True):
        places = alignment.places[begin : begin + len(recompute.again)]
        graded = structure.number[recompute.again] >= 0
        rows[places[graded]] = recompute.again[graded]
        above = int(facts.calls.parent[recompute.engine])
        if above >= 0 and structure.engine[above] >= 0:
            span = int(places.min()), int(places.max())
            if not any(same_boundary(span, other) for other in spans):
                spans.add(span)
    of_pass: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for first, last in sorted(spans):
        if counts.counted[first : last + 1].any():
            of_pass[int(counts.flight[first])].append((first, last))
    every = np.arange(len(facts.calls))
    saves = facts.calls.sums(saved_by(facts.calls, structure.role) > 0, every) > 0
    result = np.array([saves_result(name) for name in counts.names(facts.calls, slice(None))])
    sizes: dict[int, int] = {}

    def taken(place: int) -> int:
        code = int(facts.calls.dims[facts.counts.rows[place]])
        if code not in sizes:
            tensors = tensors_of(facts.trace.signatures[code])
            sizes[code] = next((number * width for number, width in tensors if width), 0)
        return sizes[code]

    def saved(first: int, last: int, without: Iterable[tuple[int, int]] = ()) -> int:
        mine = rows[first : last + 1]
        own = saves[mine]
        # A result that the next operator saves as its input is there once.
        own[:-1] &= ~(own[1:] & result[first:last] & ~result[first + 1 : last + 1])
        for begin, end in without:
            own[begin - first : end - first + 1] = False
        return sum(taken(place) for place in (first + np.flatnonzero(own)).tolist())

    found = [_levels_of(spans, taken, saved) for spans in of_pass.values()]
    known = [astuple(one) for one in found if one is not None]
    return Levels(*map(max, zip(*known, strict=True))) if 0 < len(known) == len(found) else None


def _levels_of(
    spans: list[tuple[int, int]],
    taken: Callable[[int], int],
    saved: Callable[..., int],
) -> Levels | None:
    """The same for the checkpointed calls of one forward pass."""
    inside = {
        outer: [one for one in spans if one != outer and outer[0] <= one[0] and one[1] <= outer[1]]
        for outer in spans
    }
    several = {outer: inner for outer, inner in inside.items() if len(inner) > 1}
    if not several or any(inside[one] for inner in several.values() for one in inner):
        return None
    inputs = {outer: sum(taken(first) for first, _ in inner) for outer, inner in several.items()}
    blocks = {outer: [saved(*one) for one in inner] for outer, inner in several.items()}
    if not all(all(sizes) for sizes in blocks.values()) or not all(inputs.values()):
        return None
    # The outer call saves its own work outside of the inner ones as well.
    own = {outer: saved(*outer, inner) for outer, inner in several.items()}
    most = max(max(sizes) for sizes in blocks.values())
    around = sum(taken(first) for first, _ in several)
    both = around + max(own[outer] + inputs[outer] + max(blocks[outer]) for outer in several)
    alone = around + max(own[outer] + sum(sizes) for outer, sizes in blocks.items())
    kept = sum(own.values()) + sum(inputs.values())
    return Levels(max(0, alone - both), max(0, kept + most - both))


def _held(facts: RecomputeFacts, block: Block, layer: int, ts: Int64, total: Int64) -> Held | None:
    """From the recompute that keeps most: of nested checkpoints the outer one's keeps little."""
    calls = facts.calls
    rows = facts.counts.rows[block.places]
    size, first_start, done = 0, None, -1
    for recompute in facts.alignment.recomputes:
        again = recompute.again[np.isin(recompute.original, rows)]
        if not len(again):
            continue
        first, last = int(again[0]), int(again[-1])
        begin = int(calls.start[first])
        if first == recompute.again[0] and recompute.engine != done:
            # State of random numbers is put aside before the first operator, and back after.
            begin = int(calls.start[recompute.engine])
        done = recompute.engine
        following = last + int(calls.size[last]) + 1
        # The recompute's own frames release their tensors before the next operator begins.
        same = following < len(calls) and calls.thread[following] == calls.thread[last]
        end = int(calls.start[following]) if same else int(calls.end[last])
        at = ts.searchsorted([begin, end])
        size = max(size, int(total[at[1]] - total[at[0]]))
        first_start = begin if first_start is None else min(first_start, begin)
    if first_start is None:
        return None
    return Held(layer, size, int(calls.end[rows].max()), first_start)


def arrangements_of(
    footprint: Footprint, regions: Sequence[Region], gains: Sequence[float], step_ms: float
) -> tuple[list[int], Arrangements]:
    """Places of the regions with a checkpoint that can go, and every choice among these.

    A region without its checkpoint gives its recompute time back, and holds its tensors from the
    end of its forward run to where its recompute begins today. A step gains so many ms without the
    checkpoint of each region, 0 where that stays.
    """
    free = [place for place, gain in enumerate(gains) if gain > 0]
    ever = np.iinfo(np.int64)
    times = [ever.min, ever.max, *(t for held in footprint.held for t in (held.start, held.end))]
    edges = np.unique(np.array(times, np.int64))
    starts, stops = edges[:-1], edges[1:]
    added = np.zeros((len(starts), len(regions)), np.int64)
    for held in footprint.held:
        active = (starts >= held.start) & (stops <= held.end)
        added[active, held.layer] += held.size
    fullest: dict[tuple[tuple[frozenset[Condition], int], ...], int] = {}
    # Within each span as much is allocated as what is there at its start, or comes.
    first = np.maximum(0, footprint.ts.searchsorted(starts, side="right") - 1)
    last = np.maximum(first + 1, footprint.ts.searchsorted(stops, side="left"))
    for sizes, begin, end in zip(
        *(each.tolist() for each in (added[:, free], first, last)), strict=True
    ):
        terms = tuple((frozenset({(n, KEEP)}), size) for n, size in enumerate(sizes) if size)
        base = int(footprint.allocated[begin:end].max(initial=0))
        fullest[terms] = max(fullest.get(terms, 0), base)
    again_ms = tuple(gains[place] for place in free)
    model = Arrangements(
        candidates=tuple(
            Candidate(regions[n].module or "", regions[n].signature, True, gains[n]) for n in free
        ),
        moments=tuple(Moment(base, terms) for terms, base in fullest.items()),
        again_ms=again_ms,
        keep_ms=step_ms - sum(again_ms),
        today_ms=step_ms,
    )
    return free, model


# Kept free of the capacity: the CUDA context and NCCL's buffers, which torch does not count,
# fragmentation that grows with what is allocated, and steps larger than the recorded one.
RESERVE = 0.10
_CURVE_POINTS = 16


def weigh_memory(
    footprint: Footprint,
    trace: Trace,
    regions: Sequence[Region],
    cost: Cost | None,
    machine: Machine,
) -> Memory:
    """The memory of the recorded step, and the plans for the regions."""
    gpu = footprint.device >= 0
    has = machine.memory_bytes or capacity(trace, footprint.device)
    reserve = round(RESERVE * has) if has and gpu else None
    peak, reserved = footprint.peak_allocated, footprint.peak_reserved
    apart = max(0, (reserved or peak) - peak)
    budget = has - reserve - apart if has and reserve is not None else None
    same = [region.module for region in regions] == list(footprint.modules)
    memory = Memory(
        device="gpu" if gpu else "cpu",
        # Where the host computes, only what was allocated while recording is known.
        peak_allocated_bytes=peak if gpu else None,
        peak_reserved_bytes=reserved,
        capacity_bytes=has if gpu else None,
        reserve_bytes=reserve,
        budget_bytes=budget,
        regions=tuple(
            RegionMemory(region.ordinal, footprint.saved(place) if same else None)
            for place, region in enumerate(regions)
        ),
    )
    reason = _why_no_plan(gpu, same, cost, budget, footprint)
    if reason is not None or cost is None or budget is None:
        return replace(memory, reason=reason)
    free, model = arrangements_of(
        footprint, regions, _gains(regions, cost, footprint), cost.predicted_step_ms
    )
    budgets = np.linspace(model.peak(model.everything), model.peak(model.nothing), _CURVE_POINTS)
    plans: list[MemoryPlan] = []
    best = model.solve_each(sorted([*budgets.astype(np.int64).tolist(), budget]))
    for choice in (model.everything, *best):
        if choice is not None and (not plans or model.step_ms(choice) < plans[-1].step_ms):
            out = [free[n] for n in np.flatnonzero(choice == KEEP)]
            plans.append(
                MemoryPlan(
                    regions=tuple(regions[place].ordinal for place in out),
                    step_ms=model.step_ms(choice),
                    peak_bytes=model.peak(choice),
                )
            )
    plans.sort(key=lambda plan: (plan.peak_bytes, -plan.step_ms))
    within = [place for place, plan in enumerate(plans) if plan.peak_bytes <= budget]
    chosen = min(within, key=lambda place: plans[place].step_ms, default=None)
    return replace(memory, plans=tuple(plans), chosen=chosen)


def _why_no_plan(
    gpu: bool, same: bool, cost: Cost | None, budget: int | None, footprint: Footprint
) -> str | None:
    if not gpu:
        return "The tensors are in the host's memory, which other programs share."
    if not footprint.held:
        return "No checkpointed region was recomputed while memory was recorded."
    if not same:
        return "The step in which memory was recorded ran other blocks than the profiled steps."
    if budget is None:
        return "The size of the GPU's memory is unknown: give it with --memory-gib."
    return None if cost else "The step time is unknown, so a saving cannot be computed."


def _gains(regions: Sequence[Region], cost: Cost, footprint: Footprint) -> list[float]:
    """Time that a step gains by each region, ms: its share in the recomputes needed today.

    Regions that run the same operators and keep the same bytes gain the same: their mean.
    Differences between them in a few steps are chance, and would pick layers here and there.
    """
    alike: dict[tuple[str, int | None], list[int]] = defaultdict(list)
    for place, region in enumerate(regions):
        alike[region.signature, footprint.saved(place)].append(place)
    needed = [0.0] * len(regions)
    for (_, saved), places in alike.items():
        same = [regions[place] for place in places]
        total = sum(r.recompute_ms_per_step - r.redundant_ms_per_step for r in same)
        for place in places if saved is not None else ():
            needed[place] = max(0.0, total / len(places))
    everywhere = sum(r.recompute_ms_per_step - r.redundant_ms_per_step for r in regions)
    scale = cost.breakdown.recompute / everywhere if everywhere > 0 else 0.0
    return [scale * time for time in needed]


# Ranges of the script's may stand between the two.
_LEVELS = 4
# By call site and name: ns in forwards, ns in recomputes.
_Times = dict[tuple[str, str], list[float]]
_ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "fp64": 8}
# The logarithms of the sums of exponents, one a row of scores, in 32 bits.
_ROW_BYTES = 4


class KeptAttention(Struct, frozen=True):
    """The choice to keep the results of attention.

    Attributes:
        operators: Names of the operators, as the profiler has them.
        calls: Attention calls that are recomputed in one micro-batch.
        saving_ms: What a step would gain.
        added_bytes: Bytes that one micro-batch would hold in addition.
    """

    operators: tuple[str, ...]
    calls: int
    saving_ms: float
    added_bytes: int


def keep_attention(facts: RecomputeFacts, cost: Cost) -> KeptAttention | None:
    """The choice for this trace; ``None`` where no attention is recomputed that could be kept."""
    counts = facts.counts
    recomputed = np.flatnonzero(counts.counted & (counts.runs > 0))
    needed = (counts.recompute_ns - counts.redundant_ns)[counts.counted].sum()
    if not len(recomputed) or needed <= 0:
        return None
    time, size, calls, operators = 0.0, 0, 0, set()
    batches = np.unique(counts.flight[recomputed])
    for place in recomputed.tolist():
        found = _attention(facts, int(counts.rows[place]))
        if found is None:
            continue
        operators.add(found[0])
        time += float(counts.recompute_ns[place] - counts.redundant_ns[place])
        if counts.flight[place] == batches[0]:
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
    if vocabulary.family_of(calls.called(row))[1] != "attention":
        return None
    for inner in range(row, row + 1 + int(calls.size[row])):
        name = calls.called(inner)
        inputs = parse_inputs(facts.trace.signatures[calls.dims[inner]])
        if inputs and vocabulary.family_of(name)[1] == "attention" and count_call(name, inputs):
            query, _, value = inputs.shapes[:3]
            width = _ITEM_BYTES.get(number_type(inputs), 4)
            return name, prod(query[:-1]) * (value[-1] * width + _ROW_BYTES)
    return None


def with_times(policies: Policies, facts: RecomputeFacts, scale: float) -> Policies:
    """The policies, with the time of each operator per step.

    Unknown where two policies share a call site, or one meets two overloads of a name: they look
    the same in a trace. The scale is the factor from recorded to unprofiled times.
    """
    if facts.annotations is None or not facts.complete_count:
        return policies
    times = _times(facts)
    sites = Counter(one.site for one in policies.policies)
    factor = scale / NS_PER_MS / facts.complete_count
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
    recomputes = calls.named(ANY_RECOMPUTE)
    rows = np.union1d(calls.named(re.compile(re.escape(REGION))), recomputes)
    regions = {row: parse_region(calls.called(row)) for row in rows.tolist()}
    site_of = {one.call: one.site for one in regions.values() if one is not None}
    sites = {
        row: one.site if one else site_of.get(parse_recompute(calls.called(row)) or 0)
        for row, one in regions.items()
    }
    known = [row for row in rows[facts.in_whole_step(rows)].tolist() if sites[row] is not None]
    owner = innermost(calls, np.array(known, np.int64))
    inner = np.flatnonzero(_is_inner(calls, owner))
    took = calls.duration[inner]
    if facts.work.on_gpu:  # its kernels', wherever it launched them
        launched = facts.kernels.launch >= 0
        launch, time = facts.kernels.launch[launched], facts.kernels.time[launched]
        took = calls.sums(np.bincount(launch, time, len(calls)).astype(np.int64), inner)
    found: _Times = defaultdict(lambda: [0.0, 0.0])
    again = calls.inside(recomputes)
    for row, time in zip(inner.tolist(), took.tolist(), strict=True):
        site = sites[int(owner[row])]
        assert site is not None, "of a known range"
        found[site, calls.called(row)][int(again[row])] += time
    return dict(found)


def _is_inner(calls: Calls, owner: Int32) -> Bool:
    """For each call: is it in a range, below another of its name, and the innermost of these?"""
    below, holds = np.zeros((2, len(calls)), np.bool_)
    above = calls.parent.astype(np.int64)
    for _ in range(_LEVELS):
        same = (above >= 0) & (calls.name[above] == calls.name) & (owner[above] == owner)
        below |= same
        holds[above[same]] = True
        above = np.where(above >= 0, calls.parent[above], -1)
    return np.asarray((owner >= 0) & below & ~holds)
