"""Running the steps of a graph through again, as they were or with intervals taken out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from recompute_scan.cost.clock import NOTHING, Clock, Edits, change_clock, keep_clock
from recompute_scan.cost.graph import Graph
from recompute_scan.cost.phases import Float64
from recompute_scan.model import Calls
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.trace.columns import Bool, Int64

_NEVER = -np.inf


def simulate_unchanged(graph: Graph) -> Float64:
    """How long each step takes as recorded, ns: to be held against ``Graph.measured``."""
    clocks = [keep_clock(thread) for thread in graph.threads]
    return _steps(graph, _with_host_time(graph, graph.delay.copy(), clocks))


def simulate(
    graph: Graph, facts: RecomputeFacts, edits: Edits = NOTHING, overhead: float = 0.0
) -> Float64:
    """How long each step takes with changes, ns.

    What is taken out launches nothing and waits for nothing; all else starts as soon as what it
    waited for is done.

    Args:
        graph: The steps.
        facts: The trace that they come from.
        edits: What becomes of intervals of the host's time.
        overhead: What the profiler costs at each beginning or end of a call, ns.
    """
    delay = graph.delay.copy()
    gone = _gone(graph, facts, edits)
    away, behind = gone[graph.target], gone[graph.source]
    # Of what goes, only its place along the stream or thread is left: how early whatever comes next
    # begins is the matter of what stays before.
    early = np.where(behind, 0.0, graph.early)
    delay[away] = np.where(graph.along[away], early[away], _NEVER)
    delay[~away] += (early - graph.early)[~away]
    clocks = [change_clock(thread, edits, overhead) for thread in graph.threads]
    return _steps(graph, _with_host_time(graph, delay, clocks))


def call_lengths(
    graph: Graph, calls: Calls, edits: Edits = NOTHING, overhead: float = 0.0
) -> Callable[[Int64], Float64]:
    """How long calls take, ns; edits and overhead as above, but in the steps alone."""
    threads = {each.thread: each for each in graph.threads}

    @cache
    def clock(thread: int) -> Clock:
        return change_clock(threads[thread], edits, overhead)

    def lengths(rows: Int64) -> Float64:
        found = calls.duration[rows].astype(np.float64)
        for code in np.unique(calls.thread[rows]).tolist():
            if code in threads:
                mine = np.flatnonzero(calls.thread[rows] == code)
                start, end = calls.start[rows[mine]], calls.end[rows[mine]]
                found[mine] = clock(code).at(end) - clock(code).at(start)
        return found

    return lengths


def _with_host_time(graph: Graph, delay: Float64, clocks: Sequence[Clock]) -> Float64:
    for at, one in enumerate(clocks):
        mine = graph.host == at
        if mine.any():
            delay[graph.on_host[mine]] += one.at(graph.until[mine]) - one.at(graph.since[mine])
    return delay


def _steps(graph: Graph, delay: Float64) -> Float64:
    times = _settle(graph, delay)
    over = np.maximum.accumulate([times[nodes].max() for nodes in graph.step_ends])
    return np.diff(np.concatenate(([0.0], over)))


def _gone(graph: Graph, facts: RecomputeFacts, edits: Edits) -> Bool:
    """For each node: was it launched, or waited for, in an interval that goes?"""
    calls, launches = facts.calls, facts.kernels.launch
    row = graph.call.copy()
    kernels = graph.kernel >= 0
    row[kernels] = launches[graph.kernel[kernels]]
    known = np.flatnonzero(row >= 0)
    gone = np.zeros(len(row), np.bool_)
    if not len(known):
        return gone
    gone[known] = edits.removed(calls.thread[row[known]], calls.start[row[known]])
    return gone


def _settle(graph: Graph, delay: Float64) -> Float64:
    """The time of each node: the latest that its edges ask for."""
    times: list[float] = graph.floor.tolist()
    for source, target, wait in zip(
        graph.source.tolist(), graph.target.tolist(), delay.tolist(), strict=True
    ):
        time = times[source] + wait
        if time > times[target]:
            times[target] = time
    return np.array(times)
