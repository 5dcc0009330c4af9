"""What collectives come to in a step: how many, how many bytes, how long nothing runs beside them.

Bytes are those of the larger of what one process puts in and what it gets out, as NCCL's own tests
count them: all of what an all-gather returns, all of what a reduce-scatter takes. What crosses a
link depends on the algorithm, and no trace tells it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
from msgspec import Struct

from recompute_scan.arrays import median
from recompute_scan.cost.phases import sum_covered
from recompute_scan.model import step_of
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.collectives import kernels_of, time_of
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.trace.columns import Bool, Int64, Kind

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
# Their two sides differ in size, so one of them does not tell the other.
_UNEVEN = re.compile(r".*(gather|scatter)")
# Sizes of a damaged trace.
_MOST = 2**50
_NS_PER_MS = 1e6


class Communication(Struct, frozen=True):
    """Collectives of a complete step.

    Attributes:
        count: How many, mean over the steps.
        bytes: Their bytes, mean over the steps; ``None`` where the trace does not tell those of
            each.
        exposed_ms: How long their kernels run with none beside them that computes, median over the
            steps; ``None`` where they have no kernels. A CPU's collectives run on threads of their
            own, and how long the step waits for them is in no trace.
    """

    count: float
    bytes: float | None
    exposed_ms: float | None


class Repeated(Struct, frozen=True):
    """Collectives inside recomputes, of one kind.

    Attributes:
        communication: What they come to in a step.
        names: Each name with how many a step has, the most frequent first.
        time_ms: How long they take in a step: their kernels, or the host where there are none.
        on_device: Whether that is the time of kernels.
    """

    communication: Communication
    names: tuple[tuple[str, float], ...]
    time_ms: float
    on_device: bool

    @property
    def count(self) -> float:
        """How many, mean over the steps."""
        return self.communication.count


def repeated(facts: RecomputeFacts, rows: Int64) -> Repeated:
    """What these collectives inside recomputes come to (rows of :func:`find_collectives`)."""
    calls, kernels, steps = facts.calls, facts.kernels, facts.complete_count
    names = Counter(calls.names[calls.name[row]] for row in rows)
    return Repeated(
        communication=add_up(facts, rows),
        names=tuple((name, number / steps) for name, number in names.most_common()),
        time_ms=time_of(calls, kernels, rows) / _NS_PER_MS / steps,
        on_device=bool(kernels_of(calls, kernels, rows).any()),
    )


def repeated_communication(facts: RecomputeFacts) -> Communication | None:
    """Collectives inside recomputes; ``None`` without any collective in the trace."""
    collectives = facts.collectives
    return add_up(facts, collectives.repeated) if len(collectives.rows) else None


def add_up(facts: RecomputeFacts, rows: Int64) -> Communication:
    """What these collectives come to (rows of :func:`find_collectives`)."""
    sizes = [_bytes(facts, row) for row in rows.tolist()]
    known = [size for size in sizes if size is not None]
    return Communication(
        count=len(rows) / facts.complete_count,
        bytes=sum(known) / facts.complete_count if len(known) == len(sizes) else None,
        exposed_ms=_exposed_ms(facts, rows),
    )


def _exposed_ms(facts: RecomputeFacts, rows: Int64) -> float | None:
    if not len(rows):
        return 0.0 if facts.work.on_gpu else None
    kernels = facts.kernels
    mine = kernels_of(facts.calls, facts.kernels, rows)
    if not mine.any():
        return None
    others = _computing(facts)
    step = np.full(len(mine), -1, np.int64)
    step[mine] = step_of(list(facts.steps), facts.calls.start[kernels.launch[mine]])
    alone = [_beyond(facts, step == at, others) for at in np.flatnonzero(facts.complete)]
    return median(alone) / _NS_PER_MS


def _beyond(facts: RecomputeFacts, these: Bool, others: Bool) -> float:
    """How long some of these kernels run and none of the others, ns."""
    start, end = facts.kernels.start, facts.kernels.end
    if not these.any():
        return 0.0
    beside = others & (start < end[these].max()) & (end > start[these].min())
    both = these | beside
    return sum_covered(start[both], end[both]) - sum_covered(start[beside], end[beside])


def _computing(facts: RecomputeFacts) -> Bool:
    """For each piece of device work: is it a kernel, and no communication?"""
    trace, event = facts.trace, facts.kernels.event
    talks = np.array([bool(words.TALKS.match(name)) for name in trace.names], np.bool_)
    every = kernels_of(facts.calls, facts.kernels, facts.collectives.rows)
    computing: Bool = (trace.kind[event] == Kind.KERNEL) & ~talks[trace.name[event]] & ~every
    return computing


def _bytes(facts: RecomputeFacts, row: int) -> int | None:
    """Bytes of one collective, by shapes and types of what it was called with."""
    calls = facts.calls
    inside = [
        (name, list(tensors_of(facts.trace.signatures[calls.dims[at]])))
        for at in range(row, row + 1 + int(calls.size[row]))
        if words.SHOWS_SIZES.match(name := calls.names[calls.name[at]])
    ]
    widths = {width for _, tensors in inside for _, width in tensors if width}
    widths = widths or _gloo_widths(facts)
    called = [(name, tensors) for name, tensors in inside if words.DISPATCHED.match(name)]
    if len(widths) != 1 or not called:
        return None
    name, tensors = max(called, key=lambda one: len(one[1]))
    if len(tensors) < (2 if _UNEVEN.match(name) else 1):
        return None
    size = widths.pop() * max(numbers for numbers, _ in tensors)
    return size if size < _MOST else None


def _gloo_widths(facts: RecomputeFacts) -> set[int]:
    """Widths of the numbers of all gloo collectives, which run on threads of their own."""
    calls = facts.calls
    gloo = np.unique(calls.dims[calls.named(words.GLOO)])
    return {
        width for code in gloo for _, width in tensors_of(facts.trace.signatures[code]) if width
    }


def tensors_of(signature: str) -> Iterator[tuple[int, int]]:
    """Numbers in each tensor, or list of tensors, of a call, and bytes of one; 0 if not known."""
    try:
        dims, end = json.JSONDecoder().raw_decode(signature)
        types, _ = json.JSONDecoder().raw_decode(signature, end)
    except (ValueError, RecursionError):
        return
    if not (isinstance(dims, list) and isinstance(types, list)):
        return
    for shape, kind in zip(dims, types, strict=False):
        if kind == _LIST and isinstance(shape, list) and shape:
            numbers = [_numbers(one) for one in shape]
            if None not in numbers:
                yield sum(number for number in numbers if number), 0
        elif isinstance(kind, str) and kind in _BYTES and (number := _numbers(shape)) is not None:
            yield number, _BYTES[kind]


def _numbers(shape: Any) -> int | None:
    if isinstance(shape, list) and all(type(size) is int and 0 <= size < _MOST for size in shape):
        return prod(shape)
    return None
