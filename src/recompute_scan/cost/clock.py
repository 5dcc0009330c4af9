"""How the host's time passes once intervals are taken out and the profiler's share with them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from recompute_scan.cost.phases import Float64
from recompute_scan.numpy_tools import changes
from recompute_scan.trace.calls import Calls, StepSpan
from recompute_scan.trace.columns import Bool, Int32, Int64


class TimeEdit(Struct, frozen=True):
    """One interval of one host thread, with what becomes of it.

    Attributes:
        thread: Code of the thread.
        start: Its beginning in the trace, ns.
        end: Its end, ns.
        gone: Whether the work in it goes, with all that it launched.
        add: Time that takes its place (``gone``) or comes on top, ns; may be negative.
    """

    thread: int
    start: int
    end: int
    gone: bool
    add: float = 0.0


class Edits(Struct, frozen=True):
    """Edits of one thread each, in order of time, no two of which overlap."""

    thread: Int64
    start: Int64
    end: Int64
    gone: Bool
    add: Float64

    def of(self, thread: int) -> Edits:
        """Those of one thread."""
        mine = self.thread == thread
        if mine.all():
            return self
        return Edits(
            self.thread[mine], self.start[mine], self.end[mine], self.gone[mine], self.add[mine]
        )

    def removed(self, thread: Int32, time: Int64) -> Bool:
        """For each (thread, time): does it lie in an interval that goes?"""
        found = np.zeros(len(time), np.bool_)
        for code in np.unique(self.thread) if self.gone.any() else ():
            edits = self.of(int(code))
            mine = np.flatnonzero(thread == code)
            at = edits.start.searchsorted(time[mine], side="right") - 1
            inside = (at >= 0) & (time[mine] < edits.end[at]) & edits.gone[at]
            found[mine[inside]] = True
        return found


def join(edits: Sequence[TimeEdit]) -> Edits:
    """Edits in order; where two overlap, what goes wins over what changes, then the longer.

    What an overlapped edit adds is kept on the one that covers it.
    """
    kept: list[TimeEdit] = []
    order = sorted(edits, key=lambda e: (e.thread, e.start, not e.gone, -e.end))
    for edit in order:
        if edit.end < edit.start:
            continue
        last = kept[-1] if kept and kept[-1].thread == edit.thread else None
        if last is None or edit.start >= last.end:
            kept.append(edit)
        elif last.gone and edit.gone:
            add = max(last.add, edit.add)
            kept[-1] = TimeEdit(edit.thread, last.start, max(last.end, edit.end), True, add)
        elif last.gone:
            if edit.end > last.end:
                kept.append(TimeEdit(edit.thread, last.end, edit.end, False, edit.add))
        else:
            # What goes is cut out of what changes.
            kept[-1] = TimeEdit(last.thread, last.start, edit.start, False, last.add)
            kept.append(edit)
            if edit.gone and last.end > edit.end:
                kept.append(TimeEdit(last.thread, edit.end, last.end, False, 0.0))
    return Edits(
        thread=np.array([e.thread for e in kept], np.int64),
        start=np.array([e.start for e in kept], np.int64),
        end=np.array([e.end for e in kept], np.int64),
        gone=np.array([e.gone for e in kept], np.bool_),
        add=np.array([e.add for e in kept], np.float64),
    )


NOTHING = join(())


# The part of a name that differs between calls of one kind: numbers of steps and regions.
_NUMBERED = re.compile(r"[?#].*", re.DOTALL)
# Of the same interval in at least this many steps, one that takes more than this many times the
# median, and this much more, was held up by something else.
_ENOUGH = 3
_HELD_UP = 2.0
_HELD_UP_NS = 5_000


class HostThread(Struct, frozen=True):
    """One thread of an interval of the trace, cut at every beginning and end of a call.

    Attributes:
        thread: Its code.
        times: The cuts, ascending, ns; each distinct time once.
        marks: How many calls begin or end at each cut.
        usual: The time between each cut and the next, ns; where it was held up in this step and
            not in others (by another process, a page fault), the median over the steps.
    """

    thread: int
    times: Int64
    marks: Int64
    usual: Float64


def host_threads(calls: Calls, steps: Sequence[StepSpan], main: int) -> tuple[HostThread, ...]:
    """The threads that ran calls in these steps, from the first step's start to the last's end.

    Args:
        calls: What the threads ran.
        steps: The steps, in order of time.
        main: Code of the thread that all steps belong to, whether or not it ran any.
    """
    begin, end = steps[0].start, steps[-1].end
    starts = np.array([step.start for step in steps], np.int64)
    # A call that took no time belongs to the step that it begins with.
    during = (calls.end > begin) | (calls.start >= begin)
    here = np.flatnonzero((calls.start < end) & during)
    threads = calls.thread[here]
    kinds: dict[str, int] = {}
    kind_of_name = np.array(
        [kinds.setdefault(_NUMBERED.sub("", name), len(kinds)) for name in calls.names], np.int64
    )
    found = []
    for code in np.unique(np.append(threads, main)):
        rows = here[threads == code]
        known, kind = np.unique(
            kind_of_name[calls.name[rows]] * (int(calls.dims.max()) + 1) + calls.dims[rows],
            return_inverse=True,
        )
        # A beginning and an end of one kind of call are two kinds of cut.
        kind = np.concatenate([2 * kind, 2 * kind + 1])
        cuts = np.clip(np.concatenate([calls.start[rows], calls.end[rows]]), begin, end)
        order = cuts.argsort(kind="stable")
        cuts = np.concatenate(([begin], cuts[order], [end]))
        beyond = 2 * len(known)
        kind = np.concatenate(([beyond], kind[order], [beyond]))
        first = np.flatnonzero(changes(cuts))
        times, marks = cuts[first], np.diff(first, append=len(cuts))
        last = first + marks - 1
        step = starts.searchsorted(times[:-1], side="right")
        pair = kind[last[:-1]] * (beyond + 1) + kind[first[1:]]
        usual = _usual(np.diff(times).astype(np.float64), pair, step)
        found.append(HostThread(int(code), times, marks, usual))
    return tuple(found)


def _usual(length: Float64, pair: Int64, step: Int64) -> Float64:
    """Lengths, with those held down that stand out among the same place in other steps.

    The same place is the n-th interval of a step between the same two kinds of cut.

    Args:
        length: Of each interval, ns.
        pair: A number for each two kinds of cut.
        step: Number of the step that each begins in; ascending.
    """
    if not len(length):
        return length
    # Numbers the intervals between the same two cuts anew in each step; steps are in order.
    different, pair = np.unique(pair, return_inverse=True)
    # NumPy sorts 16 bits by counting them, four times faster than what is longer.
    short = pair.astype(np.uint16) if len(different) < 1 << 16 else pair
    order = short.argsort(kind="stable")
    kinds = changes(pair[order])
    begins = np.flatnonzero(kinds | changes(step[order]))
    turn = np.arange(len(length)) - begins.repeat(np.diff(begins, append=len(length)))
    place = np.empty(len(length), np.int64)
    place[order] = pair[order] * (int(turn.max()) + 1) + turn
    # Between most pairs of cuts nothing ever takes that long.
    some = np.zeros(len(different), np.bool_)
    some[pair[length > _HELD_UP_NS]] = True
    long = order[some[pair[order]]]
    if not len(long):
        return length
    order = long[np.lexsort((length[long], place[long]))]
    begins = np.flatnonzero(changes(place[order]))
    size = np.diff(begins, append=len(order))
    median = np.repeat(length[order[begins + (size - 1) // 2]], size)
    known = np.repeat(size >= _ENOUGH, size)
    held_up = known & (length[order] > _HELD_UP * median + _HELD_UP_NS)
    usual: Float64 = length.copy()
    usual[order[held_up]] = median[held_up]
    return usual


class Clock(Struct, frozen=True):
    """New time for old on one thread, counted from the thread's first cut.

    Attributes:
        old: Times in the trace, ascending, ns.
        new: What each becomes, ns; never decreasing.
    """

    old: Int64
    new: Float64

    def at(self, times: Int64) -> Float64:
        """The new time of each old one; between two cuts time passes evenly."""
        first = self.old[0]  # nanoseconds since 1970 do not fit into a double
        return np.asarray(np.interp(times - first, self.old - first, self.new), np.float64)


def keep_clock(thread: HostThread) -> Clock:
    """The clock that shows the trace's own times."""
    return Clock(thread.times, (thread.times - thread.times[0]).astype(np.float64))


def change_clock(thread: HostThread, edits: Edits, overhead: float) -> Clock:
    """The clock of one thread.

    Args:
        thread: The thread.
        edits: What changes on it (those of other threads are ignored).
        overhead: What the profiler costs at each beginning or end of a call, ns. An interval
            between two cuts gives up that much for each, and never more than it has.
    """
    # Half of what a cut costs falls before it, half after.
    cost = 0.5 * overhead * (thread.marks[:-1] + thread.marks[1:])
    length = np.maximum(thread.usual - cost, 0.0)
    passed = np.concatenate(((0.0,), length.cumsum()))
    mine = edits.of(thread.thread)
    if not len(mine.start):
        return Clock(thread.times, passed)
    first, last = int(thread.times[0]), int(thread.times[-1])
    begins, ends = mine.start.clip(first, last), mine.end.clip(first, last)
    more = np.unique(np.concatenate([begins, ends]))
    place = thread.times.searchsorted(more)
    between = thread.times[place] != more
    more, place = more[between], place[between]
    passed_more = np.interp(more - first, thread.times - first, passed)
    old = np.concatenate((thread.times, more))
    order = old.argsort(kind="stable")
    old, length = old[order], np.diff(np.concatenate((passed, passed_more))[order])
    begin, end = old.searchsorted(begins), old.searchsorted(ends)
    some = np.flatnonzero(begin < end)
    begin, end, gone, add = begin[some], end[some], mine.gone[some], mine.add[some]
    if len(some):
        borders = np.stack((begin, end), axis=1).ravel()
        whole = np.add.reduceat(np.concatenate((length, (0.0,))), borders)[::2]
        wanted = np.maximum(0.0, np.where(gone, add, whole + add))
        size = end - begin
        place = np.repeat(end - size.cumsum(), size) + np.arange(int(size.sum()))
        scale = np.divide(wanted, whole, out=np.zeros(len(some)), where=whole > 0)
        evenly = np.where(whole > 0, 0.0, wanted / size)
        length[place] = length[place] * scale.repeat(size) + evenly.repeat(size)
    return Clock(old, np.concatenate(((0.0,), length.cumsum())))
