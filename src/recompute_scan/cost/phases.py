"""Time of a step by phase: forward, recompute, backward, optimizer and collectives.

Bytes of a collective are the larger of its input and its output on one process, as NCCL's own tests
count them: all that an all-gather returns, all that a reduce-scatter takes. The bytes that cross a
link depend on the algorithm, and are in no trace.

How busy a device was is a union of intervals of all that is recorded of it: the same quantities as
in Holistic Trace Analysis, counted separately, so that a reader can compare the two.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from msgspec import Struct

from recompute_scan.cost.flops import json_lists
from recompute_scan.numpy_tools import median, places_of
from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.alignment import host_times
from recompute_scan.recompute.by_design import kernels_of
from recompute_scan.recompute.roles import Role
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.result import DeviceTime
from recompute_scan.trace.calls import StepSpan, step_of
from recompute_scan.trace.columns import NS_PER_MS, Bool, Float64, Int64, Kind, Trace


class Phases(Struct, frozen=True):
    """One entry per complete step; ns on the device that limits the step.

    ``recompute`` is the first recompute of each operator, ``redundant`` the recomputes beyond it.
    All but ``step`` add up to ``step``.
    """

    step: Float64
    forward: Float64
    recompute: Float64
    redundant: Float64
    backward: Float64
    optimizer: Float64
    other: Float64


def host_phases(facts: RecomputeFacts) -> Phases:
    """Phases by the host's clock: what a step is made of where the host limits it."""
    calls, counts = facts.calls, facts.counts
    redundant_of = np.zeros(len(calls), np.bool_)
    redundant_of[counts.redundant_rows] = True
    begins, recomputes = _times(facts, redundant_of)
    begins = np.concatenate([begins, calls.start[facts.designed_rows]])
    needed_too = np.stack(
        [calls.duration[facts.designed_rows], np.zeros(len(facts.designed_rows))], axis=1
    )
    recomputes = np.concatenate([recomputes, needed_too])
    optimizer = facts.structure.rows(Role.OPTIMIZER)
    passes, spans = _passes(facts), facts.whole_steps
    moments = (begins, passes[:, 0], calls.start[optimizer])
    rows: list[tuple[float, ...]] = []
    for span, *places in zip(spans, *(_within(spans, each) for each in moments), strict=True):
        begun, passed, updated = places
        needed, redundant = recomputes[begun].sum(axis=0)
        inside = passes[passed]
        start, turned, ended = inside[inside[:, 2] <= span.end].T
        forward = (turned - start).sum()
        backward = (ended - turned).sum() - needed - redundant
        updates = calls.duration[optimizer[updated]].sum()
        rows.append((span.end - span.start, forward, needed, redundant, max(0, backward), updates))
    return _phases(rows)


def _within(spans: Sequence[StepSpan], moments: Int64) -> list[Int64]:
    """For each step the places of the moments in it, ascending; a trace may have thousands."""
    order = moments.argsort(kind="stable")
    edges = moments[order].searchsorted([(span.start, span.end) for span in spans])
    return [np.sort(order[first:last]) for first, last in edges.tolist()]


def _times(facts: RecomputeFacts, redundant_of: Bool) -> tuple[Int64, Float64]:
    """When each recompute began, ns, and how long its needed and its redundant part took."""
    calls, again, first = facts.calls, facts.alignment.again, facts.alignment.begins
    length = host_times(facts.alignment)
    time = calls.duration[again]
    beyond = np.add.reduceat(np.where(redundant_of[again], time, 0), first)
    beyond = beyond / np.maximum(1, np.add.reduceat(time, first))
    return calls.start[again[first]], np.stack([length * (1 - beyond), length * beyond], axis=1)


def device_phases(facts: RecomputeFacts) -> Phases:
    """Phases by kernel time; kernels belong to the step that launched them.

    Communication counts as the rest. Where kernels of several streams overlap, or run behind a host
    that is ahead of them, their sum can exceed the step, which is then that sum.
    """
    calls, structure, kernels = facts.calls, facts.structure, facts.kernels
    launched = kernels.launch >= 0
    launch, time = kernels.launch[launched], kernels.time[launched]
    top = structure.top[launch]
    role = np.where(top >= 0, structure.role[np.maximum(top, 0)], Role.RANGE)
    recomputed = np.where(top >= 0, facts.turns[np.maximum(top, 0)], 0)
    recomputed[calls.within(facts.designed_rows)[launch]] = 1
    in_backward = structure.engine[launch] >= 0
    step = step_of(facts.steps, calls.start[launch])
    inside = step >= 0
    parts = [
        np.bincount(step[inside & mine], time[inside & mine], len(facts.steps))[facts.complete]
        for mine in (
            (role == Role.FORWARD) & ~in_backward,
            recomputed == 1,
            recomputed == 2,
            in_backward & (recomputed == 0) & (role != Role.PLUMBING),
            role == Role.OPTIMIZER,
        )
    ]
    length = [span.end - span.start for span in facts.whole_steps]
    return _phases([*zip(np.maximum(length, sum(parts)), *parts, strict=True)])


def busy_share(facts: RecomputeFacts) -> float:
    """Share of the complete steps in which the GPU runs a kernel, 0..1; 0 without a GPU."""
    spans = facts.whole_steps
    if not spans or not facts.work.on_gpu:
        return 0.0
    both = facts.kernels.start, facts.kernels.end
    busy = sum(sum_covered(*(np.clip(one, s.start, s.end) for one in both)) for s in spans)
    return busy / sum(span.end - span.start for span in spans)


def sum_covered(start: Int64, end: Int64) -> float:
    """Length of the union of intervals."""
    order = start.argsort(kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    gaps = np.maximum(0, start[1:] - end[:-1])
    return float(end[-1] - start[0] - gaps.sum()) if len(start) else 0.0


def device_time(trace: Trace) -> DeviceTime | None:
    """How the device spent the time that the trace covers; ``None`` without work on one."""
    work = (trace.kind == Kind.KERNEL) | (trace.kind == Kind.COPY)
    start, end = trace.ts, trace.ts + trace.dur

    def length(these: Bool) -> float:
        return sum_covered(start[these], end[these])

    if not work.any() or not (whole := float(end[work].max() - start[work].min())):
        return None
    named = np.array([bool(vocabulary.TALKS.match(name)) for name in trace.names], np.bool_)
    talking = (trace.kind == Kind.KERNEL) & named[trace.name]
    computing = (trace.kind == Kind.KERNEL) & ~talking
    busy, computed, talked = length(work), length(computing), length(talking)
    beside = computed + talked - length(computing | talking)
    return DeviceTime(
        kernel_time_ms=whole / NS_PER_MS,
        idle_pct=100 * (1 - busy / whole),
        compute_pct=100 * computed / whole,
        non_compute_pct=100 * (busy - computed) / whole,
        overlap_pct=100 * beside / talked if talked else None,
    )


def _passes(facts: RecomputeFacts) -> Int64:
    """Forward and backward of each batch: forward's start, backward's start, backward's end."""
    calls, counts = facts.calls, facts.counts
    trained = facts.alignment.backwards > 0
    roots = facts.structure.roots
    batches = places_of(counts.flight[trained]).values()
    begun = calls.start[counts.rows[trained]]
    starts = np.sort(np.array([begun[places].min() for places in batches], np.int64))
    roots = roots[calls.start[roots].argsort(kind="stable")]
    firsts = calls.start[roots].searchsorted(starts).tolist()
    found = []
    for begin, (first, stop) in zip(starts, pairwise([*firsts, len(roots)]), strict=True):
        if first < stop:
            mine = roots[first:stop]
            found.append((begin, calls.start[mine[0]], calls.end[mine].max()))
    return np.array(found, np.int64).reshape(-1, 3)


def _phases(rows: list[tuple[float, ...]]) -> Phases:
    table = np.array(rows, np.float64).reshape(-1, 6)
    step, parts = table[:, 0], table[:, 1:]
    total = parts.sum(axis=1)
    parts = parts * np.where(total > step, step / np.maximum(total, 1), 1.0)[:, None]
    forward, recompute, redundant, backward, optimizer = parts.T
    other = np.maximum(step - parts.sum(axis=1), 0)
    return Phases(step, forward, recompute, redundant, backward, optimizer, other)


# Bytes of one number, by torch's names of types in a trace's input types.
_BYTES = {
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e4m3fnuz": 1,
    "c10::Float8_e5m2": 1,
    "c10::Float8_e5m2fnuz": 1,
    "short int": 2,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "int": 4,
    "float": 4,
    "long int": 8,
    "double": 8,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
}
_LIST = "TensorList"
# Their two sides differ in size, so both must be known.
_UNEVEN = re.compile(r".*(gather|scatter)")
# Sizes of a damaged trace.
_MOST = 2**50


class Repeated(Struct, frozen=True):
    """Collectives of a complete step, such as those inside recomputes, of one kind.

    Attributes:
        count: How many, mean over the steps.
        bytes: Their bytes, mean over the steps; ``None`` where the trace lacks the size of one.
        exposed_ms: How long their kernels run while no other kernel computes, median over the
            steps; ``None`` where they have no kernels. A CPU's collectives run on separate threads,
            and no trace shows how long the step waits for them.
        names: Each name with how many a step has, the most frequent first.
        time_ms: How long they take in a step: their kernels, or the host where there are none.
        on_device: Whether that is the time of kernels.
    """

    count: float
    bytes: float | None
    exposed_ms: float | None
    names: tuple[tuple[str, float], ...]
    time_ms: float
    on_device: bool


def repeated(facts: RecomputeFacts, rows: Int64) -> Repeated:
    """The totals of these collectives (rows of :func:`find_collectives`)."""
    calls, steps = facts.calls, facts.complete_count
    sizes = [_bytes(facts, row) for row in rows.tolist()]
    known = [size for size in sizes if size is not None]
    names = Counter(map(calls.called, rows.tolist()))
    mine = kernels_of(calls, facts.kernels, rows)
    time = facts.kernels.time[mine] if mine.any() else calls.duration[rows]
    return Repeated(
        count=len(rows) / steps,
        bytes=sum(known) / steps if len(known) == len(sizes) else None,
        exposed_ms=_exposed_ms(facts, rows, mine),
        names=tuple((name, number / steps) for name, number in names.most_common()),
        time_ms=float(time.sum()) / NS_PER_MS / steps,
        on_device=bool(mine.any()),
    )


def _exposed_ms(facts: RecomputeFacts, rows: Int64, mine: Bool) -> float | None:
    if not len(rows):
        return 0.0 if facts.work.on_gpu else None
    if not mine.any():
        return None
    trace, kernels = facts.trace, facts.kernels
    # Kernels that are no communication.
    talks = np.array([bool(vocabulary.TALKS.match(name)) for name in trace.names], np.bool_)
    others = (trace.kind[kernels.event] == Kind.KERNEL) & ~talks[trace.name[kernels.event]]
    others &= ~kernels_of(facts.calls, kernels, facts.collectives.rows)
    step = np.full(len(mine), -1, np.int64)
    step[mine] = step_of(list(facts.steps), facts.calls.start[kernels.launch[mine]])
    alone = [_beyond(facts, step == at, others) for at in np.flatnonzero(facts.complete)]
    return median(alone) / NS_PER_MS


def _beyond(facts: RecomputeFacts, these: Bool, others: Bool) -> float:
    """How long some of these kernels run while the others do not, ns."""
    start, end = facts.kernels.start, facts.kernels.end
    if not these.any():
        return 0.0
    beside = others & (start < end[these].max()) & (end > start[these].min())
    both = these | beside
    return sum_covered(start[both], end[both]) - sum_covered(start[beside], end[beside])


def _bytes(facts: RecomputeFacts, row: int) -> int | None:
    """Bytes of one collective, by the shapes and types of its arguments."""
    calls = facts.calls
    inside = [
        (name, list(tensors_of(facts.trace.signatures[calls.dims[at]])))
        for at in range(row, row + 1 + int(calls.size[row]))
        if vocabulary.SHOWS_SIZES.match(name := calls.called(at))
    ]
    widths = {width for _, tensors in inside for _, width in tensors if width}
    if not widths:  # gloo's collectives run on separate threads
        dims = np.unique(calls.dims[calls.named(vocabulary.GLOO)]).tolist()
        gloo = (one for code in dims for one in tensors_of(facts.trace.signatures[code]))
        widths = {width for _, width in gloo if width}
    called = [(name, tensors) for name, tensors in inside if vocabulary.DISPATCHED.match(name)]
    if len(widths) != 1 or not called:
        return None
    name, tensors = max(called, key=lambda one: len(one[1]))
    if len(tensors) < (2 if _UNEVEN.match(name) else 1):
        return None
    size = widths.pop() * max(numbers for numbers, _ in tensors)
    return size if size < _MOST else None


def tensors_of(signature: str) -> Iterator[tuple[int, int]]:
    """Numbers in each tensor, or list of tensors, of a call, and bytes of one; 0 if not known."""
    try:
        dims, types, *_ = json_lists(signature)
    except (ValueError, RecursionError):
        return
    for shape, kind in zip(dims, types, strict=False):
        if kind == _LIST and isinstance(shape, list) and shape:
            numbers = [_numbers(one) for one in shape]
            if None not in numbers:
                yield sum(filter(None, numbers)), 0
        elif isinstance(kind, str) and kind in _BYTES and (number := _numbers(shape)) is not None:
            yield number, _BYTES[kind]


def _numbers(shape: Any) -> int | None:
    if isinstance(shape, list) and all(type(size) is int and 0 <= size < _MOST for size in shape):
        return prod(shape)
    return None
