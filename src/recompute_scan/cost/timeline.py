"""Steps of a trace as a graph, with the moments at which a host thread waits.

Nodes are the moments that matter: the ends of kernels and copies, the ends of calls that wait for
the GPU, the hand-over between the thread that calls backward and the thread that runs it, and the
ends of steps. On a host thread time passes by its clock from one node to the next, so launches need
no nodes. An edge is a time that must pass between two nodes:

* launch: from the launching call to the kernel;
* stream: from each kernel to the next on its stream;
* event: from the last kernel of a stream when an event was recorded on it, to the next kernel of
  a stream that was made to wait for the event (:mod:`recompute_scan.cost.device`);
* synchronization: from the kernel to the end of the call that waited for it;
* hand-over: from the last call of the calling thread to the first of the backward pass, and back.

Times are chosen so that the unchanged graph gives the trace's own times. Where a node comes later
than all its edges explain, the rest is given to the edge that came last, and counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple

from recompute_scan.cost.device import Device, Waits, find_device, find_waits
from recompute_scan.numpy_tools import changes, medians_of, places_of, split, turns_of
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.trace.calls import Calls, StepSpan
from recompute_scan.trace.columns import Bool, Float64, Int64, Kind

_SYNCHRONIZE = re.compile(r"(cuda|hip|cu)(Stream|Device|Event|Ctx)Synchronize")
_WHOLE_DEVICE = re.compile(r"(cuda|hip|cu)(Device|Ctx)Synchronize")
_COPY = re.compile(r"(cuda|hip|cu)Memcpy")
# Another call waits for the GPU (a full launch queue, memory that must be freed) if it takes
# this many times longer than its kind does, and at least this long.
_SLOW = 10
_SLOW_NS = 50_000
# The most that a waiting call does besides.
_OWN_NS = 5_000

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

    The main thread, which all steps belong to, is among them whether or not it ran any.
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

    The same place is the n-th interval of a step between the same two kinds of cut, which have one
    number.
    """
    usual: Float64 = length.copy()
    different, pair = np.unique(pair, return_inverse=True)
    # Between most pairs of cuts nothing ever takes that long.
    long = np.zeros(len(different), np.bool_)
    long[pair[length > _HELD_UP_NS]] = True
    some = np.flatnonzero(long[pair])
    pair, step, length = pair[some], step[some], length[some]
    turn = turns_of(pair * (int(step.max(initial=0)) + 1) + step)
    middle, number = medians_of(length, turn, pair)
    held_up = (number >= _ENOUGH) & (length > _HELD_UP * middle + _HELD_UP_NS)
    usual[some[held_up]] = middle[held_up]
    return usual


class HostWait(Struct, frozen=True):
    """A moment at which a host thread goes on.

    Attributes:
        thread: Code of the thread.
        time: The moment, ns.
        until: Up to when the thread's own time counts before it; -1 where it only waited.
        own: Time that it needs for itself after ``until``, ns.
        call: Row of the call that waits, or -1.
        kernels: Positions in ``Device`` of the kernels that it waits for.
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
    return int(np.bincount(facts.calls.thread[here if len(here) else rows]).argmax())


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
    typical, _ = medians_of(duration, calls.name[runtime])
    synchronizes = calls.names_where(_SYNCHRONIZE.match)[calls.name[runtime]]
    copies = calls.names_where(_COPY.match)[calls.name[runtime]]
    whole = calls.names_where(_WHOLE_DEVICE.match)[calls.name[runtime]]
    slow = (duration > _SLOW_NS) & (duration > _SLOW * typical)
    own_kernel = {int(row): at for at, row in enumerate(facts.kernels.launch[device.rows])}
    by_end = device.end.argsort(kind="stable")
    ends = device.end[by_end]
    # For each stream: the earliest launch from each of its kernels on.
    streams = [
        (mine, np.minimum.accumulate(device.launched[mine][::-1])[::-1])
        for mine in places_of(device.stream).values()
    ]
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
            # The last kernel of each stream that was launched before.
            last = [(mine, int(since.searchsorted(start)) - 1) for mine, since in streams]
            before = [int(mine[place]) for mine, place in last if place >= 0]
            kernels |= {kernel for kernel in before if device.end[kernel] <= finish}
        found.append(
            HostWait(int(calls.thread[row]), finish, start, own, row, tuple(kernels), lag=lag)
        )
    return found


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


class Edges(Struct, frozen=True):
    """The times that must pass between two nodes, in the order of the nodes that wait.

    Attributes:
        source: The node that is waited for.
        target: The node that waits.
        delay: The time from the one to the other, ns.
        along: Does it run along a stream, or a host thread?
        early: Of one along a stream: how long before the end of the one the other began, if it
            did, ns, negative; else 0. That much is left of the one, whatever the other is.
        host: Position of the host thread with time that passes as well; -1 for none.
        since: When its time begins to count, ns of the trace.
        until: When it stops to count.
    """

    source: Int64
    target: Int64
    delay: Float64
    along: Bool
    early: Int64
    host: Int64
    since: Int64
    until: Int64

    @classmethod
    def of(
        cls, source: Int64, target: Int64, delay: Any, along: bool = False, **columns: Any
    ) -> Edges:
        """Some edges; a number holds for each, and no time passes on a host by default."""
        others = {"early": 0, "host": -1, "since": 0, "until": 0} | columns
        return cls(*np.broadcast_arrays(source, target, delay, along, *others.values()))

    @classmethod
    def joined(cls, parts: Sequence[Edges]) -> Edges:
        """All of these in order."""
        columns = [np.concatenate(column) for column in zip(*map(astuple, parts), strict=True)]
        # An edge against the order would ask for what is not known yet.
        good = np.flatnonzero(columns[0] < columns[1])
        order = good[columns[1][good].argsort(kind="stable")]
        return cls(*(column[order] for column in columns))


class Graph(Struct, frozen=True):
    """Some steps of a trace as nodes and edges.

    Nodes are in an order in which each comes after those it waits for; node 0 is the beginning
    of the first step.

    Attributes:
        floor: For each node the earliest time it can have, ns from the beginning: 0, and for
            kernels that were under way at the beginning the end they had.
        call: For each node the row of the call that launches its kernel, or that waits, or -1.
        begun: When the device has done what was launched before the first step, ns from its
            beginning: that is when the first step begins on the device.
        step_ends: For each step, the nodes that must be over when it is.
        measured: For each step, how long it took in the trace, ns.
        late: How much of the time no edge explains, ns.
    """

    threads: tuple[HostThread, ...]
    edges: Edges
    floor: Float64
    call: Int64
    begun: float
    step_ends: tuple[Int64, ...]
    measured: Float64
    late: float


def build_graph(facts: RecomputeFacts, steps: Sequence[StepSpan]) -> Graph:
    """The graph of steps that follow each other, in order of time."""
    nodes = _Nodes(facts, steps)
    device, waits = nodes.device, find_waits(facts, nodes.device)
    begun = max(0, int(device.end[device.earlier].max(initial=nodes.begin)) - nodes.begin)
    edges = [*nodes.launches(waits), *nodes.device_edges(waits), *nodes.host_edges()]
    step_ends, measured = nodes.step_ends(steps, begun)
    return Graph(
        threads=nodes.threads,
        edges=Edges.joined(edges),
        floor=nodes.floor(),
        call=nodes.calls(facts.kernels.launch),
        begun=float(begun),
        step_ends=step_ends,
        measured=measured,
        late=float(waits.late.sum()),
    )


class _Nodes:
    """The nodes of a graph, numbered: the beginning, then kernels and hosts' moments in order."""

    def __init__(self, facts: RecomputeFacts, steps: Sequence[StepSpan]) -> None:
        self.begin, end = steps[0].start, steps[-1].end
        self._main = main = main_thread(facts, steps[0])
        self.threads = host_threads(facts.calls, steps, main)
        self._position = {thread.thread: at for at, thread in enumerate(self.threads)}
        self.device = device = find_device(facts, self.begin, end)
        hosts = gpu_waits(facts, device, self.begin, end) + hand_overs(facts, self.threads, main)
        hosts += [HostWait(main, step.end, step.end) for step in steps]
        self._hosts = sorted(hosts, key=lambda node: node.time)
        keys = np.append(device.order, np.array([node.time for node in self._hosts], np.int64))
        kinds = np.arange(len(keys)) >= len(device)
        self._rank = np.empty(len(keys), np.int64)
        self._rank[np.lexsort((kinds, keys))] = np.arange(1, len(keys) + 1)
        self._of_kernel, self._of_host = np.split(self._rank, [len(device)])
        # The last host node before any moment of a thread; the beginning is on every thread.
        known = {thread.thread: [(self.begin, 0)] for thread in self.threads}
        for wait, number in zip(self._hosts, self._of_host.tolist(), strict=True):
            known[wait.thread].append((wait.time, number))
        self._known = {code: np.array(both, np.int64).T for code, both in known.items()}

    def _before(
        self, thread: int, moments: Int64 | int, *, strictly: bool = False
    ) -> tuple[Int64, Int64]:
        """The last host node before, and its time in the trace."""
        times, nodes = self._known[thread]
        at = times.searchsorted(moments, side="left" if strictly else "right") - 1
        at = np.maximum(at, 0)
        return nodes[at], times[at]

    def launches(self, waits: Waits) -> Iterator[Edges]:
        """From launching calls to kernels."""
        device = self.device
        long = waits.launch + (device.end - device.start).astype(np.float64)
        for code in np.unique(device.thread[device.thread >= 0]).tolist():
            mine = np.flatnonzero(device.thread == code)
            launched = device.launched[mine]
            node, since = self._before(code, launched)
            host, kernels = self._position[code], self._of_kernel[mine]
            yield Edges.of(node, kernels, long[mine], host=host, since=since, until=launched)

    def device_edges(self, waits: Waits) -> Iterator[Edges]:
        """Along streams, and from kernel to kernel by events."""
        device, of_kernel = self.device, self._of_kernel
        long = (device.end - device.start).astype(np.float64)
        later = np.flatnonzero(device.before >= 0)
        ends, early = (waits.gap + long)[later], np.minimum(waits.gap[later], 0)
        yield Edges.of(of_kernel[device.before[later]], of_kernel[later], ends, True, early=early)
        by_event = waits.lag + long[waits.target]
        yield Edges.of(of_kernel[waits.source], of_kernel[waits.target], by_event)

    def host_edges(self) -> Iterator[Edges]:
        """To the moments at which hosts go on."""
        edges: list[tuple[Any, ...]] = []
        for number, wait in zip(self._of_host.tolist(), self._hosts, strict=True):
            node, since = self._before(wait.thread, wait.time, strictly=True)
            # Where the thread only waited, its own time does not count.
            until = max(wait.until, since) if wait.until >= 0 else since
            host, own, lag = self._position[wait.thread], float(wait.own), float(wait.lag)
            edges.append((node, number, own, True, 0, host, since, until))
            for waited in wait.kernels:
                edges.append((self._of_kernel[waited], number, lag, False, 0, -1, 0, 0))
            if wait.other >= 0:
                node, since = self._before(wait.other, wait.at)
                host, until = self._position[wait.other], max(wait.at, since)
                edges.append((node, number, lag, False, 0, host, since, until))
        yield Edges(*map(np.array, zip(*edges, strict=True)))

    def floor(self) -> Float64:
        """See :class:`Graph`."""
        device, floor = self.device, np.zeros(len(self._rank) + 1)
        under_way = np.flatnonzero((device.thread < 0) & (device.before < 0))
        floor[self._of_kernel[under_way]] = np.maximum(device.end[under_way] - self.begin, 0)
        return floor

    def calls(self, launch: Int64) -> Int64:
        """See :class:`Graph`."""
        call = np.full(len(self._rank) + 1, -1, np.int64)
        call[self._of_kernel] = launch[self.device.rows]
        call[self._of_host] = [wait.call for wait in self._hosts]
        return call

    def step_ends(self, steps: Sequence[StepSpan], begun: int) -> tuple[tuple[Int64, ...], Float64]:
        """For each step the nodes that end it, and how long it took.

        A step is over when its host and its kernels are. It takes the time from the end of the step
        before to its end, so that work which the GPU still had to do is counted once. The first
        step begins when the device has done all earlier work.
        """
        device = self.device
        number_of = {
            wait.time: number
            for wait, number in zip(self._hosts, self._of_host.tolist(), strict=True)
            if wait.thread == self._main and wait.until == wait.time
        }
        ends, over = [], [self.begin + begun]
        for step in steps:
            within = (device.launched >= step.start) & (device.launched < step.end)
            mine = np.flatnonzero(within & ~device.earlier)
            ends.append(np.append(self._of_kernel[mine], number_of[step.end]))
            over.append(max([step.end, over[-1], *device.end[mine].max(initial=0, keepdims=True)]))
        # Differences first: nanoseconds since 1970 do not fit into a double.
        return tuple(ends), np.diff(np.array(over, np.int64)).astype(np.float64)
