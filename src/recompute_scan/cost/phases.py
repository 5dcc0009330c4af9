"""Where a step's time goes: forward, recomputes, backward, optimizer, and the rest."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from recompute_scan.arrays import places_of
from recompute_scan.model import StepSpan
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.recompute.roles import Role
from recompute_scan.trace.columns import Bool, Int64

Float64 = npt.NDArray[np.float64]


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
    begins = np.concatenate([begins, calls.start[facts.designed]])
    needed_too = np.stack([calls.duration[facts.designed], np.zeros(len(facts.designed))], axis=1)
    recomputes = np.concatenate([recomputes, needed_too])
    optimizer = facts.structure.rows(Role.OPTIMIZER)
    passes = _passes(facts)
    begun, passed, updated = _Begun(begins), _Begun(passes[:, 0]), _Begun(calls.start[optimizer])
    rows: list[tuple[float, ...]] = []
    for span in _complete(facts):
        needed, redundant = recomputes[begun.within(span)].sum(axis=0)
        inside = passed.within(span)
        inside = inside[passes[inside, 2] <= span.end]
        forward = (passes[inside, 1] - passes[inside, 0]).sum()
        backward = (passes[inside, 2] - passes[inside, 1]).sum() - needed - redundant
        updates = calls.duration[optimizer[updated.within(span)]].sum()
        rows.append((span.end - span.start, forward, needed, redundant, max(0, backward), updates))
    return _phases(rows)


class _Begun:
    """Moments, to be asked for those of one step without a look at all the others."""

    def __init__(self, moments: Int64) -> None:
        self._order = moments.argsort(kind="stable")
        self._sorted = moments[self._order]

    def within(self, span: StepSpan) -> Int64:
        """Places of the moments in a step, ascending."""
        first, last = self._sorted.searchsorted((span.start, span.end))
        return np.sort(self._order[first:last])


def _times(facts: RecomputeFacts, redundant_of: Bool) -> tuple[Int64, Float64]:
    """When each recompute began, ns, and how long its needed and its redundant part took."""
    calls, again, first = facts.calls, facts.alignment.again, facts.alignment.begins
    if not len(again):
        return first, np.zeros((0, 2))
    length = np.maximum.reduceat(calls.end[again], first)
    length -= np.minimum.reduceat(calls.start[again], first)
    time = calls.duration[again]
    beyond = np.add.reduceat(np.where(redundant_of[again], time, 0), first)
    beyond = beyond / np.maximum(1, np.add.reduceat(time, first))
    return calls.start[again[first]], np.stack([length * (1 - beyond), length * beyond], axis=1)


def device_phases(facts: RecomputeFacts) -> Phases:
    """Phases by kernel time; kernels belong to the step that launched them.

    Communication counts as the rest. Where kernels of several streams overlap, their sum can
    exceed the step; it is scaled down.
    """
    calls, structure, kernels = facts.calls, facts.structure, facts.kernels
    again = np.zeros(len(calls), np.int8)
    again[facts.alignment.again] = 1
    again[facts.counts.redundant_rows] = 2
    launched = kernels.launch >= 0
    launch, time = kernels.launch[launched], (kernels.end - kernels.start)[launched]
    top = structure.top[launch]
    role = np.where(top >= 0, structure.role[np.maximum(top, 0)], Role.RANGE)
    recomputed = np.where(top >= 0, again[np.maximum(top, 0)], 0)
    recomputed[calls.within(facts.designed)[launch]] = 1
    in_backward = structure.engine[launch] >= 0
    rows: list[tuple[float, ...]] = []
    for span in _complete(facts):
        here = (calls.start[launch] >= span.start) & (calls.start[launch] < span.end)

        def total(mask: Bool, here: Bool = here) -> int:
            return int(time[here & mask].sum())

        rows.append(
            (
                span.end - span.start,
                total((role == Role.FORWARD) & ~in_backward),
                total(recomputed == 1),
                total(recomputed == 2),
                total(in_backward & (recomputed == 0) & (role != Role.PLUMBING)),
                total(role == Role.OPTIMIZER),
            )
        )
    return _phases(rows)


def busy_share(facts: RecomputeFacts) -> float:
    """Share of the complete steps in which the GPU runs a kernel, 0..1; 0 without a GPU."""
    spans = _complete(facts)
    if not spans or not facts.work.on_gpu:
        return 0.0
    busy = sum(
        sum_covered(
            np.clip(facts.kernels.start, s.start, s.end), np.clip(facts.kernels.end, s.start, s.end)
        )
        for s in spans
    )
    return busy / sum(span.end - span.start for span in spans)


def sum_covered(start: Int64, end: Int64) -> float:
    """Length of the union of intervals."""
    first, last = merged(start, end)
    return float((last - first).sum())


def merged(start: Int64, end: Int64) -> tuple[Int64, Int64]:
    """Starts and ends of the union of intervals, ascending; none of it overlaps or touches."""
    if not len(start):
        return start, end
    order = start.argsort(kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    firsts = np.flatnonzero(np.concatenate(([True], start[1:] > end[:-1])))
    return start[firsts], end[np.append(firsts[1:] - 1, len(start) - 1)]


def _complete(facts: RecomputeFacts) -> list[StepSpan]:
    return [step for step, whole in zip(facts.steps, facts.complete, strict=True) if whole]


def _passes(facts: RecomputeFacts) -> Int64:
    """Forward and backward of each batch: forward's start, backward's start, backward's end."""
    calls, counts = facts.calls, facts.counts
    trained = facts.alignment.backwards > 0
    roots = facts.structure.roots
    batches = places_of(counts.batch[trained]).values()
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
