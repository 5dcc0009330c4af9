"""What waits for what in a few steps of a trace: hosts, kernels, streams, synchronisation.

Nodes are the moments that matter: the ends of kernels and copies, the ends of calls that wait
for the GPU, the hand-over between the thread that calls backward and the one that runs it, and
the ends of steps. On a host thread time passes by its clock from one node to whatever follows
(:mod:`recompute_scan.cost.clock`), so launches need no nodes. An edge is a time that must pass
between two nodes:

* launch: from the launching call to the kernel;
* stream: from each kernel to the next on its stream;
* event: from what a stream had been given when an event was recorded on it, to what another
  stream was given after it was made to wait (:mod:`recompute_scan.cost.device`);
* synchronisation: from the kernel to the end of the call that waited for it;
* hand-over: from the last thing that the calling thread did to the first of the backward pass,
  and back from the last (:mod:`recompute_scan.cost.hosts`).

Times are chosen so that the unchanged graph gives the trace's own times back: what comes later
than all its edges explain is given to the edge that came last, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from recompute_scan.cost.clock import HostThread, host_threads
from recompute_scan.cost.device import Device, find_device, find_waits
from recompute_scan.cost.hosts import HostWait, gpu_waits, hand_overs, main_thread
from recompute_scan.cost.phases import Float64
from recompute_scan.model import StepSpan
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.trace.columns import Bool, Int64


class Graph(Struct, frozen=True):
    """Some steps of a trace as nodes and edges.

    Nodes are in an order in which each comes after those it waits for; node 0 is the beginning
    of the first step. Edges are in the order of their targets.

    Attributes:
        threads: The host threads, cut at every call.
        floor: For each node the earliest time it can have, ns from the beginning: 0, and for
            kernels that were under way at the beginning the end they had.
        kernel: For each node the row in ``Kernels``, or -1.
        call: For each node the row of the call that waits, or -1.
        source: For each edge the node that is waited for.
        target: For each edge the node that waits.
        delay: For each edge the time from the one to the other, ns.
        on_host: Positions of the edges over which a host's time passes as well.
        host: For each of those, the position of the thread in ``threads``.
        since: For each of those, when its time begins to count, ns of the trace.
        until: For each of those, when it stops to count.
        along: For each edge: does it run along a stream, or a host thread?
        early: For each edge along a stream: how long before the end of the one the other began, if
            it did, ns, negative; else 0. That much is left of the one, whatever the other is.
        step_ends: For each step, the nodes that must be over when it is.
        measured: For each step, how long it took in the trace, ns.
        late: How much of the time no edge explains, ns.
    """

    threads: tuple[HostThread, ...]
    floor: Float64
    kernel: Int64
    call: Int64
    source: Int64
    target: Int64
    delay: Float64
    on_host: Int64
    host: Int64
    since: Int64
    until: Int64
    along: Bool
    early: Float64
    step_ends: tuple[Int64, ...]
    measured: Float64
    late: float


def build_graph(facts: RecomputeFacts, steps: Sequence[StepSpan]) -> Graph:
    """The graph of steps that follow each other, in order of time."""
    begin, end = steps[0].start, steps[-1].end
    main = main_thread(facts, steps[0])
    threads = host_threads(facts.calls, steps, main)
    position = {thread.thread: at for at, thread in enumerate(threads)}
    device = find_device(facts, begin, end)
    waits = find_waits(facts, device)
    hosts = gpu_waits(facts, device, begin, end) + hand_overs(facts, threads, main)
    hosts += [HostWait(main, step.end, step.end) for step in steps]
    hosts.sort(key=lambda node: node.time)

    # Numbers of the nodes: the beginning, then kernels and host nodes together in order.
    kernels = len(device)
    keys = np.concatenate([device.order, np.array([node.time for node in hosts], np.int64)])
    kinds = np.repeat([0, 1], [kernels, len(hosts)])
    rank = np.empty(len(keys), np.int64)
    rank[np.lexsort((np.arange(len(keys)), kinds, keys))] = np.arange(1, len(keys) + 1)
    of_kernel, of_host = rank[:kernels], rank[kernels:]
    anchors = _Anchors(threads, hosts, of_host, begin)

    edges = _Edges()
    launched = np.flatnonzero(device.thread >= 0)
    long = (device.end - device.start).astype(np.float64)
    for code in np.unique(device.thread[launched]):
        mine = launched[device.thread[launched] == code]
        node, since = anchors.before(int(code), device.launched[mine])
        edges.over_host(
            node,
            of_kernel[mine],
            (waits.launch + long)[mine],
            position[int(code)],
            since,
            device.launched[mine],
            along=False,
        )
    later = np.flatnonzero(device.before >= 0)
    edges.add(
        of_kernel[device.before[later]],
        of_kernel[later],
        (waits.gap + long)[later],
        along=True,
        early=np.minimum(waits.gap[later], 0),
    )
    edges.add(
        of_kernel[waits.source],
        of_kernel[waits.target],
        waits.lag + long[waits.target],
        along=False,
    )
    for number, wait in zip(of_host, hosts, strict=True):
        one = np.array([number])
        node, since = anchors.before(wait.thread, np.array([wait.time]), strictly=True)
        # Where the thread only waited, its own time does not count.
        until = np.array([wait.until]) if wait.until >= 0 else since
        own = np.array([float(wait.own)])
        edges.over_host(
            node, one, own, position[wait.thread], since, np.maximum(until, since), along=True
        )
        lag = np.array([float(wait.lag)])
        for waited in wait.kernels:
            edges.add(of_kernel[[waited]], one, lag, along=False)
        if wait.other >= 0:
            moment = np.array([wait.at])
            node, since = anchors.before(wait.other, moment)
            edges.over_host(
                node, one, lag, position[wait.other], since, np.maximum(moment, since), along=False
            )
    source, target, delay, along, early, on_host, host, since, until = edges.in_order()
    floor = np.zeros(len(keys) + 1)
    under_way = np.flatnonzero((device.thread < 0) & (device.before < 0))
    floor[of_kernel[under_way]] = np.maximum(device.end[under_way] - begin, 0)
    kernel = np.full(len(keys) + 1, -1, np.int64)
    kernel[of_kernel] = device.rows
    call = np.full(len(keys) + 1, -1, np.int64)
    call[of_host] = [wait.call for wait in hosts]
    step_ends, measured = _step_ends(steps, main, hosts, device, of_host, of_kernel)
    return Graph(
        threads=threads,
        floor=floor,
        kernel=kernel,
        call=call,
        source=source,
        target=target,
        delay=delay,
        on_host=on_host,
        host=host,
        since=since,
        until=until,
        along=along,
        early=early,
        step_ends=step_ends,
        measured=measured,
        late=float(waits.late.sum()),
    )


def _step_ends(
    steps: Sequence[StepSpan],
    main: int,
    hosts: Sequence[HostWait],
    device: Device,
    of_host: Int64,
    of_kernel: Int64,
) -> tuple[tuple[Int64, ...], Float64]:
    """For each step the nodes that end it, and how long it took.

    A step is over when its host is and its kernels are; what a step takes is counted from there
    to there, so that work which the GPU still had to do is counted once.
    """
    number_of = {
        wait.time: int(number)
        for wait, number in zip(hosts, of_host, strict=True)
        if wait.thread == main and wait.until == wait.time
    }
    ends, over = [], [steps[0].start]
    for step in steps:
        mine = np.flatnonzero((device.launched >= step.start) & (device.launched < step.end))
        ends.append(np.append(of_kernel[mine], number_of[step.end]))
        over.append(max([step.end, over[-1], *device.end[mine].max(initial=0, keepdims=True)]))
    # Differences first: nanoseconds since 1970 do not fit into a double.
    return tuple(ends), np.diff(np.array(over, np.int64)).astype(np.float64)


class _Anchors:
    """The last host node before any moment of a thread; the beginning is on every thread."""

    def __init__(
        self,
        threads: Sequence[HostThread],
        hosts: Sequence[HostWait],
        of_host: Int64,
        begin: int,
    ) -> None:
        times: dict[int, list[int]] = {thread.thread: [begin] for thread in threads}
        nodes: dict[int, list[int]] = {thread.thread: [0] for thread in threads}
        for wait, number in zip(hosts, of_host, strict=True):
            times[wait.thread].append(wait.time)
            nodes[wait.thread].append(int(number))
        self._times = {code: np.array(values, np.int64) for code, values in times.items()}
        self._nodes = {code: np.array(values, np.int64) for code, values in nodes.items()}

    def before(self, thread: int, moments: Int64, *, strictly: bool = False) -> tuple[Int64, Int64]:
        """The node, and its time in the trace."""
        times = self._times[thread]
        at = times.searchsorted(moments, side="left" if strictly else "right") - 1
        at = np.maximum(at, 0)
        return self._nodes[thread][at], times[at]


class _Edges:
    """Edges under way."""

    def __init__(self) -> None:
        self._parts: list[tuple[Int64, Int64, Float64, Int64, Int64, Int64, Bool, Int64]] = []

    def over_host(
        self,
        source: Int64,
        target: Int64,
        delay: Float64,
        host: int,
        since: Int64,
        until: Int64,
        *,
        along: bool,
        early: Int64 | None = None,
    ) -> None:
        size = len(target)
        hosts, alongs = np.full(size, host), np.full(size, along, np.bool_)
        early = np.zeros(size, np.int64) if early is None else early
        self._parts.append((source, target, delay, hosts, since, until, alongs, early))

    def add(
        self,
        source: Int64,
        target: Int64,
        delay: Float64,
        *,
        along: bool,
        early: Int64 | None = None,
    ) -> None:
        nothing = np.zeros(len(target), np.int64)
        self.over_host(source, target, delay, -1, nothing, nothing, along=along, early=early)

    def in_order(
        self,
    ) -> tuple[Int64, Int64, Float64, Bool, Float64, Int64, Int64, Int64, Int64]:
        source, target, delay, host, since, until, along, early = (
            np.concatenate(column) for column in zip(*self._parts, strict=True)
        )
        # An edge against the order would ask for what is not known yet.
        good = np.flatnonzero(source < target)
        order = good[target[good].argsort(kind="stable")]
        on_host = np.flatnonzero(host[order] >= 0)
        timed = order[on_host]
        return (
            source[order],
            target[order],
            delay[order].astype(np.float64),
            along[order],
            early[order].astype(np.float64),
            on_host,
            host[timed],
            since[timed],
            until[timed],
        )
