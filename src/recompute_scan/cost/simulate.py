"""The graph of a step run again with edits, and how far to trust the prediction.

The steps of a trace after a change, and how far that could be off.

The profiler slows the host: for every beginning and end of a call, and so more where operators
are small. How much, the steps that were timed without it tell, as far as the machine was as fast
then; beside them stands what it usually takes of the shortest intervals in a trace. The two are
weighed by how sure they are, and taken off before anything is taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from msgspec import Struct, structs

from recompute_scan.cost.autograd import TYPICAL, Hooks, scale
from recompute_scan.cost.clock import (
    NOTHING,
    Clock,
    Edits,
    TimeEdit,
    change_clock,
    join,
    keep_clock,
)
from recompute_scan.cost.phases import Float64
from recompute_scan.cost.removal import Context, Removal, annotation_edits, find_context
from recompute_scan.cost.reruns import Keep
from recompute_scan.cost.timeline import Graph, build_graph
from recompute_scan.numpy_tools import median
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.trace.calls import Calls, StepSpan
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
    ends = [times[nodes].max() for nodes in graph.step_ends]
    return np.diff(np.maximum.accumulate([graph.begun, *ends]))


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


# Steps that are simulated together, and calls in them; more tell little new and cost memory.
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
# That percentile, ns, in traces of the machine and the models that `TYPICAL` is of. It tells how
# fast a host is.
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
        facts: What is known of the trace.
        graph: The steps.
        around: What a removal from them asks of the trace.
        annotations: The run wrapper's own time.
        overhead: What the profiler costs at each beginning or end of a call, ns; 0 where no step
            was timed: the times are then those of the trace.
        other: The other account of it: none where it was taken off, and what it usually costs where
            no step was timed.
        host_speed: How much longer the host takes than the one whose times are assumed.
        steps: Each step as simulated without that and without the annotations, ns.
        other_steps: The same by the other account.
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

    Args:
        facts: What is known of the trace.
        timed: Steps without the profiler, ns; empty where none was timed.
    """
    spans = _chosen(facts)
    if not spans:
        return None
    graph = build_graph(facts, spans)
    whole = simulate_unchanged(graph)
    if not whole.sum() or not graph.measured.sum():
        return None
    annotations = tuple(annotation_edits(facts))
    short = _short(graph)

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
        around=find_context(facts, spans[0].start, spans[-1].end),
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
    """The step with all checkpoints gone but those to keep.

    Args:
        base: The steps before.
        keep: Of the checkpoints around a block, the one that stays; ``None``: none stays.
        hooks: What a saved tensor costs at the usual host speed.
    """
    hooks = scale(hooks, base.host_speed)
    removal = Removal(base.around, keep)
    share = _shares(base, removal, hooks)
    bare = _shares(base, removal, scale(hooks, 0.0))
    # With the profiler's time where it was taken off, without where it was not.
    other = _shares(
        structs.replace(base, overhead=base.other, steps=base.other_steps), removal, hooks
    )
    middle = _typical(share, base)
    saved = abs(1 - middle)
    late = None
    if removal.stops_unseen:
        late = _typical(_shares(base, removal, hooks, early_stop=False), base)
    work = base.facts.work
    kernels = max(1, len(base.facts.kernels.event))
    unknown = (
        base.graph.late / base.graph.measured.sum() + (work.unlaunched - work.queued) / kernels
    )
    return Prediction(
        share=middle,
        doubts={
            "simulation": float(base.error),
            "steps": _steps_doubt(share[np.isfinite(share)], saved),
            "profiler": float(
                np.hypot(_typical(other, base) - middle, base.unlike * saved),
            ),
            "hooks": 0.5 * abs(_typical(bare, base) - middle),
            "early_stop": abs(late - middle) if late is not None else 0.0,
            "places": base.around.recordings.unevenness() * saved,
            "unattributed": min(1.0, float(unknown)) * saved,
            "change": _CHANGE * saved,
        },
        late=late,
    )


def _steps_doubt(shares: Float64, saved: float) -> float:
    """Of a single step nothing is known but that steps differ."""
    return middle_doubt(shares) if len(shares) > 1 else _SINGLE * saved


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
    """What the profiler takes at each beginning or end of a call, ns; see the module.

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


def _short(graph: Graph) -> float:
    """What an interval between two beginnings or ends of calls takes at ``_SHORT`` percent, ns."""
    usual = np.concatenate([thread.usual for thread in graph.threads])
    return float(np.percentile(usual, _SHORT))


def _chosen(facts: RecomputeFacts) -> list[StepSpan]:
    """The longest row of complete steps without a hole, cut where it gets too long."""
    rows: list[list[StepSpan]] = [[]]
    for step, whole in zip(facts.steps, facts.complete, strict=True):
        if whole:
            rows[-1].append(step)
        elif rows[-1]:
            rows.append([])
    longest = max(rows, key=len)
    starts = np.sort(facts.calls.start)
    chosen: list[StepSpan] = []
    calls = 0
    for step in longest[:_MOST_STEPS]:
        calls += int(starts.searchsorted(step.end) - starts.searchsorted(step.start))
        if chosen and calls > _MOST_CALLS:
            break
        chosen.append(step)
    return chosen
