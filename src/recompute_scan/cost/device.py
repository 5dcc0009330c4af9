"""Kernels and copies of an interval of trace, and what each waited for.

A trace does not say on which stream an event was recorded. (``cuda_sync`` rows would, but they
must be asked for, and CUDA 12.9 and newer leave them empty: pytorch/kineto#1552.) As torch
records events behind the work to wait for, the stream of the thread's last launch is taken. Of the
records before a wait, the last one with a kernel that had ended when the waiting kernel began is
taken, so that nothing contradicts the trace.
"""

from __future__ import annotations

import re
from bisect import bisect_left

import numpy as np
from msgspec import Struct

from recompute_scan.numpy_tools import places_of
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.trace.columns import Bool, Int32, Int64

_RECORD = re.compile(r"(cuda|hip)EventRecord|cuEventRecord")
_WAIT = re.compile(r"(cuda|hip|cu)StreamWaitEvent")
# A kernel that ends this shortly before another begins is taken for what that one waited for,
# where nothing else explains that it came so late.
_AT_ONCE_NS = 15_000
_LATE_NS = 50_000
# How many records before a wait are looked at.
_RECORDS = 64
# From a launch to its kernel, and from kernel to kernel, where the trace has no example, ns.
_LAUNCH_NS = 5_000
_GAP_NS = 1_000


class Device(Struct, frozen=True):
    """Device work of an interval of trace, in order of start, ns.

    Attributes:
        rows: Row in ``Kernels``.
        launched: Start of the launching call; its own start where that is unknown.
        thread: Code of the launching thread; -1 where it is unknown or the launch came before
            the interval.
        before: Position of the one before on its stream, or -1.
        earlier: Whether it was launched before the interval.
        order: When it is over in any order that respects streams and launches.
    """

    rows: Int64
    start: Int64
    end: Int64
    stream: Int64
    launched: Int64
    thread: Int64
    before: Int64
    earlier: Bool
    order: Int64

    def __len__(self) -> int:
        return len(self.rows)


class Waits(Struct, frozen=True):
    """Why each kernel began when it did.

    Attributes:
        launch: From the launch to the start, ns: what must pass at least.
        gap: From the end of the one before on the stream to the start, likewise.
        source: Positions of kernels on other streams that were waited for.
        target: Positions of those that waited; ascending.
        lag: From the end of the one to the start of the other.
        late: How much later than all this explains each began, ns. The time above that came last
            has it already.
    """

    launch: Int64
    gap: Int64
    source: Int64
    target: Int64
    lag: Int64
    late: Int64


def find_device(facts: RecomputeFacts, begin: int, end: int) -> Device:
    """Device work launched before ``end`` and over after ``begin``."""
    calls, kernels = facts.calls, facts.kernels
    known = kernels.launch >= 0
    launched = np.where(known, calls.start[kernels.launch], kernels.start)
    rows = np.flatnonzero((launched < end) & (kernels.end > begin))
    start, finish = kernels.start[rows], kernels.end[rows]
    stream = facts.trace.thread[kernels.event[rows]].astype(np.int64)
    launched = launched[rows]
    inside = known[rows] & (launched >= begin)
    earlier = kernels.queued[rows] | (known[rows] & (launched < begin))
    thread = np.where(inside, calls.thread[kernels.launch[rows]], -1).astype(np.int64)
    before = np.full(len(rows), -1, np.int64)
    order = np.maximum(finish, launched)
    for part in places_of(stream).values():
        before[part[1:]] = part[:-1]
        order[part] = np.maximum.accumulate(order[part])
    return Device(rows, start, finish, stream, launched, thread, before, earlier, order)


def find_waits(facts: RecomputeFacts, device: Device) -> Waits:
    """The waits of each kernel; see :class:`Waits`."""
    source, target = _event_waits(facts, device)
    launched, first = device.thread >= 0, device.before < 0
    since_launch = device.start - device.launched
    since_before = np.where(first, 0, device.start - device.end[device.before])
    idle = launched & (first | (device.end[device.before] < device.launched))
    launch_ns = _typical(since_launch[idle], 25, _LAUNCH_NS)
    queued = ~first & (since_launch - since_before > launch_ns)
    queued[target] = False  # these may have waited for another stream
    gap_ns = _typical(since_before[queued], 50, _GAP_NS)
    launch = np.minimum(since_launch, launch_ns)
    gap = np.minimum(since_before, gap_ns)
    lag = np.minimum(device.start[target] - device.end[source], gap_ns)
    never = np.iinfo(np.int64).min
    by_launch = np.where(launched, device.launched + launch, never)
    by_stream = np.where(first, never, device.end[device.before] + gap)
    by_event = np.full(len(device), never)
    np.maximum.at(by_event, target, device.end[source] + lag)
    reasons = np.stack((by_launch, by_stream, by_event))
    ready, last = reasons.max(axis=0), reasons.argmax(axis=0)
    late = np.where(ready > never, device.start - ready, 0)
    more_source, more_target = _unseen_waits(device, late)
    source, target = np.append(source, more_source), np.append(target, more_target)
    lag = np.append(lag, device.start[more_target] - device.end[more_source])
    late[more_target] = 0
    launch = launch + np.where(last == 0, late, 0)
    gap = gap + np.where(last == 1, late, 0)
    lag = lag + np.where(last[target] == 2, late[target], 0)
    order = target.argsort(kind="stable")
    return Waits(launch, gap, source[order], target[order], lag[order], late)


def _event_waits(facts: RecomputeFacts, device: Device) -> tuple[Int64, Int64]:
    """Pairs of kernels: an event made the second wait for the first."""
    calls = facts.calls
    waits = calls.named(_WAIT)
    records = calls.named(_RECORD)
    records = records[calls.start[records].argsort(kind="stable")]
    last = _neighbour(device, calls.thread[records], calls.start[records], before=True)
    records, last = records[last >= 0], last[last >= 0]
    recorded = calls.start[records]
    following = _neighbour(device, calls.thread[waits], calls.start[waits], before=False)
    waits, following = waits[following >= 0], following[following >= 0]
    waited = calls.start[waits]
    newest_of = recorded.searchsorted(waited) - 1
    launches = _Launches(device)
    # Lists: an element of an array costs ten times one of a list.
    stream, start, end, order = (
        array.tolist() for array in (device.stream, device.start, device.end, device.order)
    )
    moments, sources = recorded.tolist(), last.tolist()
    pairs = []
    for wait, target, newest in zip(
        waited.tolist(), following.tolist(), newest_of.tolist(), strict=True
    ):
        for at in range(newest, max(-1, newest - _RECORDS), -1):
            source = sources[at]
            if stream[source] == stream[target]:
                # Recorded just for this wait, so on another stream than the one that waits.
                between = bisect_left(launches.all, moments[at]) < bisect_left(launches.all, wait)
                if at < newest or between:
                    continue
                source = launches.last_on_another(target, moments[at])
                if source < 0:
                    continue
            if end[source] <= start[target]:
                if order[source] <= order[target]:
                    pairs.append((source, target))
                break
    found = np.array(sorted(set(pairs), key=lambda pair: pair[::-1]), np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


class _Launches:
    """All launches in order of time, and the launches of each stream."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.all = np.sort(device.launched).tolist()
        self._of_stream = {}
        for stream, part in places_of(device.stream).items():
            kernels = part[device.launched[part].argsort(kind="stable")]
            self._of_stream[stream] = (kernels, device.launched[kernels].tolist())

    def last_on_another(self, target: int, before: int) -> int:
        """The last kernel launched before a time on another stream than the target's, or -1.

        Only one that was over when the target began.
        """
        device = self._device
        found, latest = -1, -1
        for stream, (kernels, launched) in self._of_stream.items():
            at = bisect_left(launched, before) - 1
            if stream == device.stream[target] or at < 0:
                continue
            kernel = int(kernels[at])
            later = found < 0 or launched[at] > latest
            if later and device.end[kernel] <= device.start[target]:
                found, latest = kernel, launched[at]
        return found


def _neighbour(device: Device, thread: Int32, time: Int64, *, before: bool) -> Int64:
    """Position of the last kernel launched before each (thread, time), or the first after it."""
    found = np.full(len(time), -1, np.int64)
    for code in np.unique(thread):
        mine = np.flatnonzero(device.thread == code)
        mine = mine[device.launched[mine].argsort(kind="stable")]
        asked = np.flatnonzero(thread == code)
        at = np.searchsorted(device.launched[mine], time[asked]) - (1 if before else 0)
        good = (at >= 0) & (at < len(mine))
        found[asked[good]] = mine[at[good]]
    return found


def _unseen_waits(device: Device, late: Int64) -> tuple[Int64, Int64]:
    """Kernels that began late, and at once when one on another stream had ended: those pairs."""
    target = np.flatnonzero(late > _LATE_NS)
    by_end = device.end.argsort(kind="stable")
    at = np.searchsorted(device.end[by_end], device.start[target], side="right") - 1
    source = by_end[np.maximum(at, 0)]
    good = (
        (at >= 0)
        & (device.stream[source] != device.stream[target])
        & (device.start[target] - device.end[source] <= _AT_ONCE_NS)
        & (device.order[source] <= device.order[target])
        & (source != target)
    )
    return source[good], target[good]


def _typical(times: Int64, percent: float, otherwise: int) -> int:
    times = times[times >= 0]
    return int(np.percentile(times, percent)) if len(times) else otherwise
