"""A trace as a tree of calls, with its steps and its launches: what every analysis walks.

Host events of one thread nest by time (a call stands inside the call whose interval holds
it). Device kernels hang on the runtime call that launched them, by correlation number, never
by their own time: a GPU runs behind its host, in one public trace by 38 ms.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import numpy as np

from recompute_scan.trace.columns import Bool, Int8, Int32, Int64, Kind, Trace

_STEP = re.compile(r"ProfilerStep#(\d+)$")
_OPTIMIZER_STEP = re.compile(r"Optimizer\.step#")
# Times written as absolute float microseconds are off by up to a quarter of one.
_SLACK_NS = 1000


@dataclass(frozen=True)
class Calls:
    """Operators, annotations and runtime calls of the host, as one forest.

    Rows stand in order of (thread, start); the descendants of row r are the rows
    ``r + 1 … r + size[r]``. Times are ns on the trace's clock.

    Attributes:
        event: Row of the event in the trace.
        parent: Row of the enclosing call, -1 at the top.
        depth: 0 at the top.
        size: Number of descendants.
        levels: Rows of each depth, in order.
        overruns: How many intervals were cut because they crossed another.
    """

    event: Int64
    name: Int32
    kind: Int8
    thread: Int32
    start: Int64
    end: Int64
    sequence: Int64
    dims: Int32
    parent: Int64
    depth: Int64
    size: Int64
    levels: tuple[Int64, ...]
    names: tuple[str, ...]
    overruns: int

    def __len__(self) -> int:
        return len(self.start)

    @property
    def duration(self) -> Int64:
        """Duration of each call, in ns."""
        return self.end - self.start

    def named(self, pattern: re.Pattern[str]) -> Int64:
        """Rows whose name matches from its beginning."""
        return np.flatnonzero(self.matching(pattern)[self.name])

    def matching(self, pattern: re.Pattern[str]) -> Bool:
        """One entry per distinct name: does it match from its beginning?"""
        return np.array([bool(pattern.match(name)) for name in self.names], np.bool_)


@dataclass(frozen=True)
class Kernels:
    """Device work of the trace, in order of start; times in ns.

    Attributes:
        event: Row of the event in the trace.
        launch: Row in :class:`Calls` of the runtime call that launched it, -1 where the trace
            holds no record of the launch.
    """

    event: Int64
    start: Int64
    end: Int64
    launch: Int64


@dataclass(frozen=True)
class StepSpan:
    """One optimizer step: its number as recorded, and its interval in ns."""

    index: int
    start: int
    end: int


def nest(trace: Trace) -> Calls:
    """The calls of the host as a forest; see :class:`Calls`."""
    host = np.isin(trace.kind, (Kind.OP, Kind.ANNOTATION, Kind.RUNTIME))
    event = np.flatnonzero(host)
    order = np.lexsort((event, -trace.dur[event], trace.ts[event], trace.thread[event]))
    event = event[order]
    thread, start = trace.thread[event], trace.ts[event]
    end = start + trace.dur[event]
    depth = np.zeros(len(event), np.int64)
    parent = np.full(len(event), -1, np.int64)
    overruns = 0
    edges = np.flatnonzero(np.diff(thread)) + 1
    for first, last in zip((0, *edges), (*edges, len(event)), strict=True):
        part = slice(int(first), int(last))
        depth[part], above, cut = _nest_thread(start[part], end[part])
        parent[part] = np.where(above >= 0, above + first, -1)
        overruns += cut
    levels = _levels(depth)
    size = np.zeros(len(event), np.int64)
    for rows in reversed(levels[1:]):
        np.add.at(size, parent[rows], size[rows] + 1)
    return Calls(
        event=event,
        name=trace.name[event],
        kind=trace.kind[event],
        thread=thread,
        start=start,
        end=end,
        sequence=trace.sequence[event],
        dims=trace.dims[event],
        parent=parent,
        depth=depth,
        size=size,
        levels=levels,
        names=trace.names,
        overruns=overruns,
    )


def link_kernels(trace: Trace, calls: Calls) -> Kernels:
    """Device work with the call that launched each piece; see :class:`Kernels`.

    Linked by correlation alone: ``External id`` repeats the correlation between torch 1.11
    and 2.3 and collides with operator numbers there, and ``ac2g`` arrows miss launches.
    """
    event = np.flatnonzero(np.isin(trace.kind, (Kind.KERNEL, Kind.COPY)))
    event = event[np.argsort(trace.ts[event], kind="stable")]
    launches = np.flatnonzero(calls.kind == Kind.RUNTIME)
    numbers = trace.correlation[calls.event[launches]]
    launches, numbers = launches[numbers >= 0], numbers[numbers >= 0]
    by_number = np.argsort(numbers, kind="stable")
    launches, numbers = launches[by_number], numbers[by_number]
    wanted = trace.correlation[event]
    launch = np.full(len(event), -1, np.int64)
    if len(numbers):
        at = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
        launch = np.where((numbers[at] == wanted) & (wanted >= 0), launches[at], -1)
    start = trace.ts[event]
    return Kernels(event=event, start=start, end=start + trace.dur[event], launch=launch)


def find_steps(calls: Calls) -> list[StepSpan]:
    """The steps of the trace, in order.

    From the profiler's own step ranges; without them, from the end of one optimizer step to
    the end of the next; without those, the whole trace is one step.
    """
    marked = calls.named(_STEP)
    if len(marked):
        spans: dict[int, StepSpan] = {}
        for row in marked[np.argsort(calls.start[marked], kind="stable")]:
            number = int(calls.names[calls.name[row]].partition("#")[2])
            spans.setdefault(number, StepSpan(number, int(calls.start[row]), int(calls.end[row])))
        return list(spans.values())
    if not len(calls):
        return []
    begin, finish = int(calls.start.min()), int(calls.end.max()) + 1
    optimizer = calls.named(_OPTIMIZER_STEP)
    ends = sorted(int(end) for end in calls.end[optimizer])
    if not ends:
        return [StepSpan(0, begin, finish)]
    # What follows the last optimizer step belongs to a step that was not recorded whole.
    return [
        StepSpan(index, first, last)
        for index, (first, last) in enumerate(zip((begin, *ends[:-1]), ends, strict=True))
    ]


def marks_steps(calls: Calls) -> bool:
    """Does the trace mark its steps, so that :func:`find_steps` need not take it for one?"""
    return bool(len(calls.named(_STEP)) or len(calls.named(_OPTIMIZER_STEP)))


def step_of(steps: list[StepSpan], times: Int64) -> Int64:
    """Position in ``steps`` of the step that holds each time, -1 for none."""
    if not steps:
        return np.full(len(times), -1, np.int64)
    starts = np.array([step.start for step in steps], np.int64)
    ends = np.array([step.end for step in steps], np.int64)
    at = np.searchsorted(starts, times, side="right") - 1
    return np.where((at >= 0) & (times < ends[np.maximum(at, 0)]), at, -1)


def _nest_thread(start: Int64, end: Int64) -> tuple[Int64, Int64, int]:
    """Depth and parent of each interval of one thread; ``end`` is cut in place to nest."""
    depth = _depths(start, end)
    parent = _parents(depth)
    limit = np.where(parent >= 0, end[parent], np.iinfo(np.int64).max)
    if not (end > limit).any():
        return depth, parent, 0
    cut = _cut_to_nest(start, end)
    depth = _depths(start, end)
    return depth, _parents(depth), cut


def _cut_to_nest(start: Int64, end: Int64) -> int:
    """Cut crossing intervals of one thread in place; how many were cut.

    A call that outlives the one it began in ends with it, unless it began within the slack of
    that one's end: then they are neighbours whose rounded times overlap, and the first gives way.
    """
    cut = 0
    begins, ends = start.tolist(), end.tolist()
    still_open: list[int] = []
    for row, begin in enumerate(begins):
        while still_open and ends[still_open[-1]] <= begin:
            still_open.pop()
        while still_open and ends[still_open[-1]] < ends[row]:
            above = still_open[-1]
            shared = ends[above] - begin
            cut += 1
            if begins[above] < begin and shared <= min(_SLACK_NS, ends[row] - ends[above]):
                ends[above] = begin
                still_open.pop()
            else:
                ends[row] = ends[above]
        still_open.append(row)
    end[:] = ends
    return cut


def _depths(start: Int64, end: Int64) -> Int64:
    rows = np.arange(len(start))
    closed = np.searchsorted(np.sort(end), start, side="right")
    # A call without duration holds nothing, and closes after calls of the same instant before
    # it, not after those behind it: those are counted in `closed` and must come off.
    empty_before = np.concatenate(([0], np.cumsum(end == start)))
    behind = np.searchsorted(start, start, side="right")
    closed -= empty_before[behind] - empty_before[rows]
    return rows - closed


def _parents(depth: Int64) -> Int64:
    parent = np.full(len(depth), -1, np.int64)
    levels = _levels(depth)
    for above, rows in itertools.pairwise(levels):
        if len(above):
            parent[rows] = above[np.searchsorted(above, rows) - 1]
    return parent


def _levels(depth: Int64) -> tuple[Int64, ...]:
    by_depth = np.argsort(depth, kind="stable")
    edges = np.searchsorted(depth[by_depth], np.arange(1, (depth.max() if len(depth) else 0) + 1))
    return tuple(np.split(by_depth, edges))
