"""Steps of a trace run again with edits, and how far to trust the prediction.

The profiler slows the host at every beginning and end of a call, and so more where operators are
small. Two estimates say by how much: the steps timed without it, if the machine was as fast then,
and the usual share of the shortest intervals in a trace. They are weighed by their uncertainty, and
the result is taken off before any edit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby

import numpy as np
from msgspec import Struct, structs

from recompute_scan.cost.removal import Context, Removal, TimeEdit, annotation_edits
from recompute_scan.cost.reruns import TYPICAL, Hooks, Keep
from recompute_scan.cost.timeline import Graph, HostThread, build_graph
from recompute_scan.numpy_tools import median
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.trace.calls import Calls, StepSpan
from recompute_scan.trace.columns import Bool, Float64, Int32, Int64


class Edits(Struct, frozen=True):
    """Edits in order of thread and time. They never overlap."""

    thread: Int64
    start: Int64
    end: Int64
    gone: Bool
    add: Float64

    def of(self, thread: int) -> Edits:
        """The edits of one thread."""
        mine = self.thread == thread
        return self if mine.all() else Edits(*(column[mine] for column in structs.astuple(self)))

    def removed(self, thread: Int32, time: Int64) -> Bool:
        """For each (thread, time): does it lie in an interval that goes?"""
        found = np.zeros(len(time), np.bool_)
        for code in np.unique(self.thread).tolist():
            edits, mine = self.of(code), np.flatnonzero(thread == code)
            at = edits.start.searchsorted(time[mine], side="right") - 1
            found[mine] = (at >= 0) & (time[mine] < edits.end[at]) & edits.gone[at]
        return found


def join(edits: Sequence[TimeEdit]) -> Edits:
    """Edits in order. Of two that overlap the one that goes counts, then the longer one.

    The time that an overlapped edit adds is kept on the one that covers it.
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
            # The part that goes is cut out of the part that changes.
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


class Clock(Struct, frozen=True):
    """New time for old on one thread, counted from the thread's first cut; ns, never decreasing."""

    old: Int64
    new: Float64

    def at(self, times: Int64) -> Float64:
        """The new time of each old one; between two cuts time passes evenly."""
        first = self.old[0]  # nanoseconds since 1970 do not fit into a double
        return np.asarray(np.interp(times - first, self.old - first, self.new), np.float64)


def change_clock(thread: HostThread, edits: Edits, overhead: float) -> Clock:
    """The clock of one thread.

    An interval between two cuts gives up the profiler's overhead for each, and never more than it
    has.
    """
    # A cut costs half its time before it, half after.
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


_NEVER = -np.inf


def simulate_unchanged(graph: Graph) -> Float64:
    """How long each step takes as recorded, ns: to be held against ``Graph.measured``."""
    clocks = [
        Clock(thread.times, (thread.times - thread.times[0]).astype(np.float64))
        for thread in graph.threads
    ]
    return _steps(graph, graph.edges.delay.copy(), clocks)


def simulate(
    graph: Graph, facts: RecomputeFacts, edits: Edits = NOTHING, overhead: float = 0.0
) -> Float64:
    """How long each step takes with edits, and without the profiler's overhead a call, ns.

    What is taken out launches nothing and waits for nothing; all else starts as soon as what it
    waited for is done.
    """
    edges, rows = graph.edges, graph.call
    delay = edges.delay.copy()
    # For each node: was it launched, or waited for, in an interval that goes?
    gone = (rows >= 0) & edits.removed(facts.calls.thread[rows], facts.calls.start[rows])
    away, behind = gone[edges.target], gone[edges.source]
    # Only the place of a removed kernel along its stream or thread is left: the one that stays
    # before says how early the next begins.
    early = np.where(behind, 0.0, edges.early)
    delay += early - edges.early
    delay[away] = np.where(edges.along[away], early[away], _NEVER)
    clocks = [change_clock(thread, edits, overhead) for thread in graph.threads]
    return _steps(graph, delay, clocks)


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


def _steps(graph: Graph, delay: Float64, clocks: Sequence[Clock]) -> Float64:
    """The lengths of the steps; the hosts' time is added to ``delay`` in place."""
    edges = graph.edges
    for at, one in enumerate(clocks):
        mine = np.flatnonzero(edges.host == at)
        delay[mine] += one.at(edges.until[mine]) - one.at(edges.since[mine])
    # The time of each node: the latest that its edges ask for.
    times: list[float] = graph.floor.tolist()
    columns = (edges.source, edges.target, delay)
    for source, target, wait in zip(*map(np.ndarray.tolist, columns), strict=True):
        time = times[source] + wait
        if time > times[target]:
            times[target] = time
    over = np.array(times)
    ends = [over[nodes].max() for nodes in graph.step_ends]
    return np.diff(np.maximum.accumulate([graph.begun, *ends]))


# Steps that are simulated together, and calls in them; more add little and cost memory.
_MOST_STEPS = 8
_MOST_CALLS = 1_000_000
# Up to this percentile of the intervals between two beginnings or ends of calls, little but the
# profiler's own work happens in them, so it can take no longer than that one does; a trace that is
# slower yet was slowed by something else.
_SHORT = 40
# Of that time, what it usually takes, and the standard deviation of that, from the recordings of
# `benchmarks/results/prediction-method.md`.
_USUAL = 0.85
_SPREAD = 0.15
# By how much of a step the speed of a steady machine can differ between timing and profiling.
_DRIFT = 0.02
# Of the steps of a trace, how many count at least.
_FEWEST = 3
# That percentile, ns, in traces of the machine and the models that `TYPICAL` is of: a measure of
# the speed of a host.
_REFERENCE_NS = 465.0
_SPEEDS = 0.7, 2.0
# Of the saving: what memory and caches make of a change, which no trace shows. From the measured
# cases of `benchmarks/results/prediction-method.md`.
_CHANGE = 0.1
# Of the saving: how far single steps of those recordings can be from their median (95 %).
_SINGLE = 0.15
# Half the width of a 95 % interval around a median, in standard deviations, for one value.
_MEDIAN_95 = 1.96 * 1.2533
_DEVIATION = 1.4826  # of a normal distribution, in median absolute deviations


class Base(Struct, frozen=True):
    """Steps of a trace, ready to be simulated.

    Attributes:
        graph: The steps.
        around: The surroundings of the operators that ran again.
        annotations: The run wrapper's own time.
        overhead: What the profiler costs at each beginning or end of a call, ns; 0 where no step
            was timed: the times of the trace then stay.
        other: The other estimate of it: 0 where it was taken off, and its usual cost where no step
            was timed.
        host_speed: How much longer the host takes than the host of the assumed times.
        steps: Each step as simulated without that and without the annotations, ns.
        other_steps: The same by the other estimate.
        unlike: How far these are from the timed ones, as a share of them; 0 where none was timed.
        error: How far the unchanged simulation is from the trace, as a share of it.
    """

    facts: RecomputeFacts
    graph: Graph
    around: Context
    annotations: tuple[TimeEdit, ...]
    overhead: float
    other: float
    host_speed: float
    steps: Float64
    other_steps: Float64
    unlike: float
    error: float


class Prediction(Struct, frozen=True):
    """The step after a change, as a share of the step before.

    Attributes:
        share: The median over the faster half of the steps, which whatever else ran slowed least;
            above 1 where the change costs time.
        doubts: What it could be off by to either side (95 %), as a share of the step before,
            by cause.
        late: The same share without early stop, where the trace does not show whether it is on.
    """

    share: float
    doubts: dict[str, float]
    late: float | None = None

    @property
    def doubt(self) -> float:
        """All causes together; they have nothing to do with each other."""
        return float(np.sqrt(sum(value**2 for value in self.doubts.values())))


def prepare(facts: RecomputeFacts, timed: Float64) -> Base | None:
    """The complete steps of a trace; ``None`` where there are none.

    Timed are steps without the profiler, ns; empty where none was timed.
    """
    spans = _chosen(facts)
    if not spans:
        return None
    graph = build_graph(facts, spans)
    whole = simulate_unchanged(graph)
    if not whole.sum() or not graph.measured.sum():
        return None
    annotations = tuple(annotation_edits(facts))
    usual = np.concatenate([thread.usual for thread in graph.threads])
    short = float(np.percentile(usual, _SHORT))

    def simulated(overhead: float) -> Float64:
        return simulate(graph, facts, join(annotations), overhead)

    slow = simulated(0.0)
    if not slow.any():
        return None

    def without(overhead: float) -> tuple[float, Float64]:
        """Of steps so short that nothing would be left of any, nothing is taken off."""
        steps = simulated(overhead) if overhead else slow
        return (overhead, steps) if steps.any() else (0.0, slow)

    overhead, steps = without(
        _overhead(slow, simulated(short), timed, short) if len(timed) else 0.0
    )
    other, other_steps = without(0.0 if len(timed) else _USUAL * short)
    return Base(
        facts=facts,
        graph=graph,
        around=Context(facts, spans[0].start, spans[-1].end),
        annotations=annotations,
        overhead=overhead,
        other=other,
        host_speed=float(np.clip(short / _REFERENCE_NS, *_SPEEDS)),
        steps=steps,
        other_steps=other_steps,
        unlike=abs(median(steps) / median(timed) - 1) if len(timed) else 0.0,
        error=float(abs(whole.sum() / graph.measured.sum() - 1)),
    )


def predict(base: Base, keep: Keep | None, hooks: Hooks = TYPICAL) -> Prediction:
    """The step with all checkpoints gone but those to keep; without ``keep`` none stays."""
    hooks = hooks.scaled(base.host_speed)
    removal = Removal(base.around, keep)
    share = _shares(base, removal, hooks)
    bare = _shares(base, removal, hooks.scaled(0.0))
    # With the profiler's time where it was taken off, without where it was not.
    other = _shares(
        structs.replace(base, overhead=base.other, steps=base.other_steps), removal, hooks
    )
    middle, known = _typical(share, base), share[np.isfinite(share)]
    saved = abs(1 - middle)
    late = None
    if removal.stops_unseen:
        late = _typical(_shares(base, removal, hooks, early_stop=False), base)
    work = base.facts.work
    unlaunched = (work.unlaunched - work.queued) / max(1, len(base.facts.kernels.event))
    unknown = base.graph.late / base.graph.measured.sum() + unlaunched
    return Prediction(
        share=middle,
        doubts={
            "simulation": float(base.error),
            # Of a single step nothing is known but that steps differ.
            "steps": middle_doubt(known) if len(known) > 1 else _SINGLE * saved,
            "profiler": float(np.hypot(_typical(other, base) - middle, base.unlike * saved)),
            "hooks": 0.5 * abs(_typical(bare, base) - middle),
            "early_stop": abs(late - middle) if late is not None else 0.0,
            "places": base.around.recordings.unevenness() * saved,
            "unattributed": min(1.0, float(unknown)) * saved,
            "change": _CHANGE * saved,
        },
        late=late,
    )


def middle_doubt(values: Float64) -> float:
    """Half the width of a 95 % interval around the median of these values; 0 for a single one."""
    if len(values) < 2:
        return 0.0
    return _MEDIAN_95 * _deviation(values) / float(np.sqrt(len(values)))


def _deviation(values: Float64) -> float:
    """Standard deviation, whatever single values do."""
    return _DEVIATION * median(np.abs(values - median(values)))


def _shares(
    base: Base, removal: Removal, hooks: Hooks, *, early_stop: bool | None = None
) -> Float64:
    """Each step after the removal, as a share of itself before; not a number for an empty one."""
    lengths = call_lengths(base.graph, base.facts.calls, join(base.annotations), base.overhead)
    edits = join([*base.annotations, *removal.edits(hooks, lengths, early_stop=early_stop)])
    after = simulate(base.graph, base.facts, edits, base.overhead)
    shares: Float64 = np.full(len(base.steps), np.nan)
    return np.divide(after, base.steps, out=shares, where=base.steps > 0)


def _typical(shares: Float64, base: Base) -> float:
    """The median over the faster half of the steps."""
    steps = np.flatnonzero(np.isfinite(shares))
    steps = steps[base.steps[steps].argsort(kind="stable")]
    return median(shares[steps[: max(_FEWEST, round(len(steps) / 2))]])


def _overhead(slow: Float64, fast: Float64, timed: Float64, most: float) -> float:
    """The profiler's time at each beginning or end of a call, ns; see the module.

    Args:
        slow: The steps as they were.
        fast: The same where it takes as much as it can.
        timed: Steps without it.
        most: That much, ns.
    """
    # Time of a step for each ns of it.
    slope = (median(slow) - median(fast)) / most if most else 0.0
    if slope <= 0:
        return 0.0
    found = (median(slow) - median(timed)) / slope
    # Steps in a row vary together, so that many of them are no surer than one.
    doubts = (_deviation(slow), _deviation(timed), _DRIFT * median(timed))
    unsure = float(np.linalg.norm(doubts)) / slope
    spread = _SPREAD * most
    weight = spread**2 / (spread**2 + unsure**2)
    return min(most, max(0.0, weight * found + (1 - weight) * _USUAL * most))


def _chosen(facts: RecomputeFacts) -> list[StepSpan]:
    """The longest row of complete steps without a hole, cut where it gets too long."""
    both = zip(facts.steps, facts.complete.tolist(), strict=True)
    rows = [[step for step, _ in row] for whole, row in groupby(both, lambda one: one[1]) if whole]
    starts = np.sort(facts.calls.start)
    chosen: list[StepSpan] = []
    calls = 0
    for step in max(rows, key=len, default=[])[:_MOST_STEPS]:
        calls += int(starts.searchsorted(step.end) - starts.searchsorted(step.start))
        if chosen and calls > _MOST_CALLS:
            break
        chosen.append(step)
    return chosen
