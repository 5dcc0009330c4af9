"""A trace as a tree of calls, with its steps and its launches: what every analysis walks.

Host events of one thread nest by time: a call is inside the call with the interval that holds it.
Device kernels belong to the runtime call that launched them, by correlation number, never by their
time: a GPU runs behind its host, in one public trace by 38 ms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from recompute_scan.trace.columns import (
    KIND_NAMES,
    Bool,
    CallRows,
    EventRows,
    Int8,
    Int16,
    Int32,
    Int64,
    Ints,
    Kind,
    Trace,
)
from recompute_scan.trace.nesting import (
    are_whole,
    levels_of,
    nest_intervals,
    tell_apart,
    whole_trees,
)

_STEP = re.compile(r"ProfilerStep#(\d{1,18})$")
_OPTIMIZER_STEP = re.compile(r"Optimizer\.step#")
_HOST = (Kind.OP, Kind.ANNOTATION, Kind.RUNTIME)


class Calls(Struct, frozen=True):
    """Operators, annotations and runtime calls of the host, as one forest.

    Rows are in order of (thread, start); the descendants of row r are the rows
    ``r + 1 … r + size[r]``. Times are ns on the trace's clock. Long traces have millions of
    rows, so columns are as narrow as they can be, and are the trace's own where its events
    are in this order already.

    Attributes:
        events: Rows of the events in the trace, as a slice of it where they are one.
        duration: How long each lasts; ``end - start``.
        parent: Row of the enclosing call, -1 at the top.
        depth: 0 at the top.
        size: Number of descendants.
        overruns: How many intervals were cut because they crossed another.
        guessed: How many calls are in their parent by a guess, because times in whole microseconds
            leave it open, and so does the rest of the trace. 0 where times are finer.
    """

    events: slice | Int32
    name: Int32
    kind: Int8
    thread: Int32
    start: Int64
    end: Int64
    duration: Int64
    sequence: Ints
    dims: Int32
    parent: Int32
    depth: Int16
    size: Int32
    names: tuple[str, ...]
    overruns: int
    guessed: int = 0
    made_by: Ints | None = None

    def __len__(self) -> int:
        return len(self.start)

    @property
    def event(self) -> EventRows | Int32:
        """Row of each call's event in the trace."""
        if isinstance(self.events, slice):
            return np.arange(self.events.start, self.events.stop)
        return self.events

    def levels(self) -> Iterator[CallRows]:
        """Rows of one depth, the top first; after a few whole trees the next few from the top."""
        for piece in whole_trees(self.depth == 0):
            yield from levels_of(self.depth[piece], piece.start)

    def levels_up(self) -> Iterator[CallRows]:
        """The same from the deepest to those below the top."""
        for piece in whole_trees(self.depth == 0):
            yield from reversed(levels_of(self.depth[piece], piece.start)[1:])

    def above(self, row: int) -> Iterator[int]:
        """Rows of the calls around one, the innermost first."""
        while (row := int(self.parent[row])) >= 0:
            yield row

    def within(self, rows: Ints) -> Bool:
        """For each call: is it one of these, or inside one of them?"""
        return self._held(rows, rows)

    def inside(self, rows: Ints) -> Bool:
        """For each call: is it inside one of these?"""
        return self._held(rows, rows + 1)

    def _held(self, rows: Ints, begins: Ints) -> Bool:
        edges = np.zeros(len(self) + 1, np.int64)
        np.add.at(edges, begins, 1)
        np.add.at(edges, rows + 1 + self.size[rows], -1)
        return np.asarray(edges.cumsum()[:-1] > 0)

    def sums(self, values: npt.NDArray[Any], rows: Ints) -> Int64:
        """Of these calls: the sum of the values of each and of all inside it."""
        before = np.zeros(len(self) + 1, np.int64)
        np.cumsum(values, out=before[1:])
        return np.asarray(before[rows + 1 + self.size[rows]] - before[rows])

    def holding(self, marked: Bool, rows: Ints) -> Int64:
        """For each of these calls: how many of the marked ones are inside it."""
        return np.asarray(self.sums(marked, rows) - marked[rows])

    def called(self, row: int | np.integer[Any]) -> str:
        """Name of a call."""
        return self.names[int(self.name[row])]

    def named(self, pattern: re.Pattern[str]) -> CallRows:
        """Rows with a name that matches from its beginning."""
        return np.flatnonzero(self.where(pattern.match))

    def where(self, holds: Callable[[str], object]) -> Bool:
        """For each call: does this hold of its name?"""
        return self.names_where(holds)[self.name]

    def names_where(self, holds: Callable[[str], object]) -> Bool:
        """The same for each of the different names."""
        return np.array([bool(holds(name)) for name in self.names], np.bool_)


class Kernels(Struct, frozen=True):
    """Device work of the trace, in order of start; times in ns.

    Attributes:
        event: Row of the event in the trace.
        launch: Row in :class:`Calls` of the runtime call that launched it, -1 where the trace
            holds no record of the launch.
        queued: Whether it was launched before recording began: there is no record of that, and
            its stream, which runs in the order of launches, had all others after it.
    """

    event: EventRows
    start: Int64
    end: Int64
    launch: CallRows
    queued: Bool

    @property
    def time(self) -> Int64:
        """How long each ran."""
        return self.end - self.start


class StepSpan(Struct, frozen=True):
    """One optimizer step: its number as recorded, and its interval in ns."""

    index: int
    start: int
    end: int


def nest(trace: Trace, kinds: Sequence[int] = _HOST) -> Calls:
    """The events of these kinds, the host's calls by default, as a forest; see :class:`Calls`."""
    wanted = np.array([kind in kinds for kind in range(len(KIND_NAMES))], np.bool_)
    rows: Int32 = np.flatnonzero(wanted[trace.kind]).astype(np.int32)
    cut = guessed = 0
    events: slice | Int32
    if are_whole(trace, rows):
        events, start, end, cut, guessed = tell_apart(trace, rows)
        duration = end - start
    else:
        events = _events(trace, rows)
        start, duration = trace.ts[events], trace.dur[events]
        end = start + duration
    thread = trace.thread[events]
    depth, parent, size, overruns = nest_intervals(thread, start, end)
    return Calls(
        events=events,
        name=trace.name[events],
        kind=trace.kind[events],
        thread=thread,
        start=start,
        end=end,
        duration=end - start if overruns else duration,
        sequence=trace.sequence[events],
        dims=trace.dims[events],
        parent=parent,
        depth=depth,
        size=size,
        names=trace.names,
        overruns=cut + overruns,
        guessed=guessed,
        made_by=None if trace.made_by is None else trace.made_by[events],
    )


def link_kernels(trace: Trace, calls: Calls) -> Kernels:
    """Device work with the call that launched each piece; see :class:`Kernels`.

    Linked by correlation alone: ``External id`` repeats the correlation between torch 1.11
    and 2.3 and collides with operator numbers there, and ``ac2g`` arrows miss launches.
    """
    event = np.flatnonzero((trace.kind == Kind.KERNEL) | (trace.kind == Kind.COPY))
    event = event[trace.ts[event].argsort(kind="stable")]
    launches = np.flatnonzero(calls.kind == Kind.RUNTIME)
    numbers = trace.correlation[calls.event[launches]]
    launches, numbers = launches[numbers >= 0], numbers[numbers >= 0]
    by_number = numbers.argsort(kind="stable")
    launches, numbers = launches[by_number], numbers[by_number]
    wanted = trace.correlation[event]
    launch = np.full(len(event), -1, np.int64)
    if len(numbers):
        at = np.minimum(numbers.searchsorted(wanted), len(numbers) - 1)
        launch = np.where((numbers[at] == wanted) & (wanted >= 0), launches[at], -1)
    start = trace.ts[event]
    known, stream = launch >= 0, trace.thread[event]
    begins = int(calls.start[launch[known]].min()) if known.any() else np.iinfo(np.int64).min
    first = np.full(len(trace.threads), begins, np.int64)
    # In order of start, so that the first one of a stream is found last.
    first[stream[known][::-1]] = start[known][::-1]
    return Kernels(
        event=event,
        start=start,
        end=start + trace.dur[event],
        launch=launch,
        queued=~known & (start < first[stream]),
    )


def find_steps(calls: Calls) -> list[StepSpan]:
    """The steps of the trace, in order.

    From the profiler's own step ranges; without them, from the end of one optimizer step to
    the end of the next; without those, the whole trace is one step.
    """
    marked = calls.named(_STEP)
    if len(marked):
        spans: dict[int, StepSpan] = {}
        for row in marked[calls.start[marked].argsort(kind="stable")]:
            number = int(calls.called(row).partition("#")[2])
            spans.setdefault(number, StepSpan(number, int(calls.start[row]), int(calls.end[row])))
        return list(spans.values())
    if not len(calls):
        return []
    begin, finish = int(calls.start.min()), int(calls.end.max()) + 1
    optimizer = calls.named(_OPTIMIZER_STEP)
    ends = sorted(int(end) for end in calls.end[optimizer])
    if not ends:
        return [StepSpan(0, begin, finish)]
    # Calls behind the last optimizer step belong to a step that was not recorded whole.
    return [
        StepSpan(index, first, last)
        for index, (first, last) in enumerate(zip((begin, *ends[:-1]), ends, strict=True))
    ]


def marks_steps(calls: Calls) -> bool:
    """Does the trace mark its steps, so that :func:`find_steps` need not take it for one?"""
    return bool(len(calls.named(_STEP)) or len(calls.named(_OPTIMIZER_STEP)))


def step_of(steps: Sequence[StepSpan], times: Int64) -> Int64:
    """Position in ``steps`` of the step that holds each time, -1 for none."""
    if not steps:
        return np.full(len(times), -1, np.int64)
    starts = np.array([step.start for step in steps], np.int64)
    ends = np.array([step.end for step in steps], np.int64)
    at = starts.searchsorted(times, side="right") - 1
    return np.where((at >= 0) & (times < ends[np.maximum(at, 0)]), at, -1)


def _events(trace: Trace, rows: Int32) -> slice | Int32:
    """Rows of events in order, as a slice of the trace where they are one."""
    if not len(rows):
        return slice(0, 0)
    part = slice(int(rows[0]), int(rows[-1]) + 1)
    if len(rows) == part.stop - part.start and _in_order(trace, part):
        return part
    return rows[np.lexsort((rows, -trace.dur[rows], trace.ts[rows], trace.thread[rows]))]


def _in_order(trace: Trace, rows: slice) -> bool:
    """Are these events in order of (thread, start, longest first)?"""
    thread, start, length = trace.thread[rows], trace.ts[rows], trace.dur[rows]
    later = (start[1:] > start[:-1]) | ((start[1:] == start[:-1]) & (length[1:] <= length[:-1]))
    return bool(((thread[1:] > thread[:-1]) | ((thread[1:] == thread[:-1]) & later)).all())
