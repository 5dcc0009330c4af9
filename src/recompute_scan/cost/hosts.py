"""Where a host thread waits: for the GPU, or for another thread to run the backward pass."""

from __future__ import annotations

import re

import numpy as np
from msgspec import Struct

from recompute_scan.arrays import changes, split
from recompute_scan.cost.clock import HostThread
from recompute_scan.cost.device import Device
from recompute_scan.model import StepSpan
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.trace.columns import Int32, Int64, Kind

_SYNCHRONIZE = re.compile(r"(cuda|hip|cu)(Stream|Device|Event|Ctx)Synchronize")
_WHOLE_DEVICE = re.compile(r"(cuda|hip|cu)(Device|Ctx)Synchronize")
_COPY = re.compile(r"(cuda|hip|cu)Memcpy")
# Another call waits for the GPU (a full launch queue, memory that must be freed) if it takes
# this many times longer than its kind does, and at least this long.
_SLOW = 10
_SLOW_NS = 50_000
# What a call that waits does besides, at most.
_OWN_NS = 5_000


class HostWait(Struct, frozen=True):
    """A moment at which a host thread goes on.

    Attributes:
        thread: Code of the thread.
        time: The moment, ns.
        until: Up to when the thread's own time counts before it; -1 where it only waited.
        own: Time that it needs for itself after ``until``, ns.
        call: Row of the call that waits, or -1.
        kernels: Positions in ``Device`` of what it waits for.
        other: Code of the thread that it waits for, or -1.
        at: The moment on that thread, ns.
        lag: From what is waited for to this moment, ns.
    """

    thread: int
    time: int
    until: int
    own: int = 0
    call: int = -1
    kernels: tuple[int, ...] = ()
    other: int = -1
    at: int = -1
    lag: int = 0


def main_thread(facts: RecomputeFacts, step: StepSpan) -> int:
    """Code of the thread that runs the training loop: most of the forward pass is there."""
    rows = facts.counts.rows
    rows = rows if len(rows) else np.arange(len(facts.calls))
    here = rows[(facts.calls.start[rows] >= step.start) & (facts.calls.start[rows] < step.end)]
    threads = facts.calls.thread[here if len(here) else rows]
    codes, times = np.unique(threads, return_counts=True)
    return int(codes[np.argmax(times)])


def gpu_waits(facts: RecomputeFacts, device: Device, begin: int, end: int) -> list[HostWait]:
    """Calls that ended because the GPU had come so far.

    A synchronisation with the device waits for all that was launched before; one with a stream
    or an event for the last kernel that ended before it did; a copy for itself; any other call
    that took unusually long for the last kernel that ended while it lasted.
    """
    calls = facts.calls
    runtime = np.flatnonzero(
        (calls.kind == Kind.RUNTIME) & (calls.start >= begin) & (calls.start < end)
    )
    if not len(device) or not len(runtime):
        return []
    duration = calls.duration[runtime]
    typical = _typical(calls.name[runtime], duration, len(calls.names))
    synchronizes = calls.matching(_SYNCHRONIZE)[calls.name[runtime]]
    copies = calls.matching(_COPY)[calls.name[runtime]]
    whole = calls.matching(_WHOLE_DEVICE)[calls.name[runtime]]
    slow = (duration > _SLOW_NS) & (duration > _SLOW * typical)
    own_kernel = {int(row): at for at, row in enumerate(facts.kernels.launch[device.rows])}
    by_end = device.end.argsort(kind="stable")
    ends = device.end[by_end]
    found = []
    for at in np.flatnonzero(synchronizes | copies | slow):
        row = int(runtime[at])
        start, finish = int(calls.start[row]), int(calls.end[row])
        if copies[at]:
            kernel = own_kernel.get(row, -1)
            waited = kernel >= 0 and device.end[kernel] <= finish
        else:
            place = int(ends.searchsorted(finish, side="right")) - 1
            kernel = int(by_end[place]) if place >= 0 else -1
            waited = kernel >= 0 and (synchronizes[at] or device.end[kernel] > start)
        if not waited:
            continue
        # The rest of the call is its own, and passes in any case.
        lag = finish - int(device.end[kernel])
        own = min(finish - start, _OWN_NS)
        if lag >= finish - start:  # the GPU had been done before
            own, lag = finish - start, min(lag, _OWN_NS)
        kernels = {kernel}
        if whole[at]:
            kernels |= {k for k in _last_of_streams(device, start) if device.end[k] <= finish}
        found.append(
            HostWait(int(calls.thread[row]), finish, start, own, row, tuple(kernels), lag=lag)
        )
    return found


def _last_of_streams(device: Device, before: int) -> list[int]:
    """Position of the last kernel of each stream that was launched before a time."""
    mine = np.flatnonzero(device.launched < before)
    # In order of start, so that the last one of a stream is found first from behind.
    streams, last = np.unique(device.stream[mine][::-1], return_index=True)
    return mine[::-1][last].tolist() if len(streams) else []


def hand_overs(facts: RecomputeFacts, threads: tuple[HostThread, ...], main: int) -> list[HostWait]:
    """Backward passes that another thread than the main one ran, which waited for it.

    Autograd has a thread for each GPU; ``backward`` hands the graph to it and waits.
    """
    cuts = {thread.thread: thread.times for thread in threads}
    calls, times = facts.calls, cuts[main]
    roots = facts.structure.roots
    found = []
    for code in np.unique(calls.thread[roots]):
        if int(code) == main or int(code) not in cuts:
            continue
        rows = np.flatnonzero((calls.thread == code) & (calls.depth == 0))
        rows = rows[(calls.start[rows] >= times[0]) & (calls.end[rows] <= times[-1])]
        gap = times.searchsorted(calls.start[rows], side="right") - 1
        for part in split(rows, np.flatnonzero(changes(gap))):
            first, last = int(calls.start[part].min()), int(calls.end[part].max())
            at = int(times.searchsorted(first, side="right")) - 1
            asked, resumed = int(times[at]), int(times[min(at + 1, len(times) - 1)])
            found.append(HostWait(int(code), first, -1, other=main, at=asked, lag=first - asked))
            if last <= resumed:
                found.append(
                    HostWait(main, resumed, -1, other=int(code), at=last, lag=resumed - last)
                )
    return found


def _typical(name: Int32, duration: Int64, names: int) -> Int64:
    """The median duration of each call's kind."""
    median = np.zeros(names, np.int64)
    order = np.lexsort((duration, name))
    for part in split(order, np.flatnonzero(changes(name[order]))):
        median[name[part[0]]] = duration[part[len(part) // 2]]
    return median[name]
