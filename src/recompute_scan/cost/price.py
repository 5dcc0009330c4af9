"""The cost of the recomputes in time: of the step today, after the fix, and without checkpoints.

The step time is the median of unprofiled steps where the run wrapper timed some, else of the
recorded steps. The saving of a change is simulated (:mod:`recompute_scan.cost.simulate`) and taken
off that median.

Where a trace has kernels alone, recomputes are sequences of kernels
(:mod:`recompute_scan.recompute.kernel_order`). The saving is the device's time from the start of
each redundant kernel to the start of the next one on its stream: the kernel where the device is the
limit, and the time between launches where the host is. The step is the range that marks it, or the
period after which the whole sequence returns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from recompute_scan.cost.phases import Phases, busy_share, device_phases, host_phases, repeated
from recompute_scan.cost.reruns import Keep
from recompute_scan.cost.simulate import Base, Prediction, middle_doubt, predict, prepare
from recompute_scan.intervals import median_interval
from recompute_scan.numpy_tools import median
from recompute_scan.recompute.attention_kernels import PRODUCT, more_products
from recompute_scan.recompute.kernel_order import BACKWARD, RECOMPUTE, KernelSequence
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.result import Breakdown, Checkpoint, Cost
from recompute_scan.trace.columns import NS_PER_MS, Bool, Float64, Int64, Kind

# Below this share of busy time the host, not the GPU, limits the step.
GPU_LIMITS = 0.7


def keep_last(checkpoints: Sequence[Checkpoint]) -> Checkpoint:
    """The innermost checkpoint, which asks for the last recompute."""
    return checkpoints[-1]


def price(
    facts: RecomputeFacts, timed_steps_ms: Sequence[float], keep: Keep = keep_last
) -> Cost | None:
    """The cost of the recomputes, with the checkpoint that the fix keeps of those around a block.

    ``None`` when no step is complete. Timed steps are those without the profiler, if there are any.
    """
    timed = np.array(timed_steps_ms, np.float64)
    base = prepare(facts, timed * NS_PER_MS)
    if base is None:
        return None
    on_gpu = busy_share(facts) >= GPU_LIMITS
    phases = device_phases(facts) if on_gpu else host_phases(facts)
    if not phases.step.sum():
        return None
    steps = timed if len(timed) else base.graph.measured / NS_PER_MS
    typical = median(steps)
    step_low, step_high = median_interval(steps.tolist()) if len(steps) > 1 else (None, None)
    breakdown = _breakdown(phases, typical, by_kernels=on_gpu)
    wasteful = len(facts.counts.redundant_rows) > 0
    fixed = predict(base, keep) if wasteful else Prediction(1.0, {})
    low, high = _interval(fixed, steps) if wasteful else (typical, typical)
    bare = predict(base, None) if facts.alignment.recomputes else None
    bare_low, bare_high = _interval(bare, steps) if bare else (None, None)
    collectives = facts.collectives
    again = repeated(facts, collectives.repeated) if len(collectives.rows) else None
    scale = time_scale(facts, timed_steps_ms)
    return Cost(
        step_ms=typical,
        step_source="timed" if len(timed) else "trace",
        device="gpu" if on_gpu else "cpu",
        recompute_ms=breakdown.recompute + breakdown.redundant,
        redundant_recompute_ms=breakdown.redundant,
        repeated_collectives_ms=again.time_ms * scale if again else None,
        predicted_step_ms=typical * fixed.share,
        predicted_low_ms=low,
        predicted_high_ms=high,
        saving_pct=100 * (1 - fixed.share),
        breakdown=breakdown,
        method="simulation",
        assumptions=_assumptions(base, on_gpu, len(timed), fixed),
        simulation_error_pct=100 * base.error,
        doubt_ms={cause: typical * share for cause, share in fixed.doubts.items()},
        bare_step_ms=typical * bare.share if bare else None,
        bare_low_ms=bare_low,
        bare_high_ms=bare_high,
        step_low_ms=step_low,
        step_high_ms=step_high,
        steps=len(steps),
        repeated_collectives_count=again.count if again else None,
        repeated_collectives_bytes=again.bytes if again else None,
        repeated_collectives_exposed_ms=again.exposed_ms if again else None,
        predicted_late_ms=typical * fixed.late if fixed.late is not None else None,
    )


def _interval(prediction: Prediction, steps: Float64) -> tuple[float, float]:
    """The step after the change (95 %), with what the median step itself could be off by."""
    typical = median(steps)
    middle = typical * prediction.share
    doubt = float(np.hypot(typical * prediction.doubt, prediction.share * middle_doubt(steps)))
    return max(0.0, middle - doubt), middle + doubt


def time_scale(facts: RecomputeFacts, timed_steps_ms: Sequence[float]) -> float:
    """The factor from recorded host times to times of the timed step.

    The profiler slows the host down and leaves kernels as they are: 1 where times are kernel
    times, where no step was timed, or where none is complete.
    """
    lengths = [step.end - step.start for step in facts.whole_steps]
    if facts.work.on_gpu or not len(timed_steps_ms) or not sum(lengths):
        return 1.0
    return median(timed_steps_ms) / (float(np.mean(lengths)) / NS_PER_MS)


def _breakdown(phases: Phases, step_ms: float, *, by_kernels: bool) -> Breakdown:
    """Means of all steps, in a step that takes this long.

    The profiler slows the host down and leaves kernels as they are. So the host's phases are shares
    of the step, and phases of kernels keep their times: the rest of the step is ``other``.
    """
    names = ("forward", "recompute", "redundant", "backward", "optimizer")
    parts = {name: float(getattr(phases, name).mean()) / NS_PER_MS for name in names}
    scale = step_ms / (float(phases.step.mean()) / NS_PER_MS)
    if by_kernels:
        scale = step_ms / max(step_ms, sum(parts.values()))
    parts = {name: scale * time for name, time in parts.items()}
    return Breakdown(**parts, other=max(0.0, step_ms - sum(parts.values())))


def _assumptions(base: Base, on_gpu: bool, timed: int, fixed: Prediction) -> tuple[str, ...]:
    count = len(base.steps)
    found = [
        f"{count} recorded {'step was' if count == 1 else 'steps were'} simulated as a graph of "
        "host calls, launches, streams, events and synchronization, with the redundant runs and "
        "all they launched taken out.",
        f"The saving is subtracted from the median of {timed} steps timed without the profiler."
        if timed
        else "No step was timed without the profiler, so the times come from the recorded steps, "
        "which the profiler slows down.",
    ]
    if base.overhead:
        found.append(
            f"The profiler took {2 * base.overhead / 1000:.1f} µs a call, which was subtracted "
            f"first."
        )
    if fixed.doubts.get("hooks"):
        found.append(
            "This trace does not show how long a non-reentrant checkpoint takes for each saved "
            "tensor; a typical time was assumed, give or take half of it."
        )
    if fixed.late is not None:
        found.append(
            "The remaining recompute is assumed to stop early. This trace does not show whether "
            "the script switches that off; if it does, "
            f"{100 * (1 - fixed.late):.1f} % of the step would be saved."
        )
    if base.facts.work.on_gpu and not on_gpu:
        found.append("The GPU is idle for much of the step, so the host's time limits the step.")
    if base.facts.alignment.recomputes:
        found.append(
            "Other processes keep the times at which they reached each collective; memory, and "
            "what it changes, is left as it was."
        )
    return tuple(found)


# The sequence returns after a period if this share of it does, in the same places.
_SAME = 0.98
# How far the edges of recomputes may put the prediction off, as a share of the saving.
_DOUBT = 0.1
_MOST_PERIODS = 64
# Kernels of a last product and what follows it.
_LONGEST_END = 4
# Of a recompute in two pieces, or between two: fewer kernels may be a gradient's own.
_PIECE = 3
# Autograd saves what they make: behind them, early stop leaves out what is next.
_KEEPS_RESULT = re.compile(r"dropout|softmax|sigmoid|tanh|norm", re.I)


def price_by_kernels(facts: RecomputeFacts, timed_steps_ms: Sequence[float]) -> Cost | None:
    """The cost of recomputes by kernels alone; ``None`` where attention or the step is unknown."""
    evidence = facts.attention
    sequence = evidence.sequence(facts.trace, facts.kernels) if evidence is not None else None
    steps = _steps(facts, sequence) if sequence is not None else None
    if evidence is None or sequence is None or steps is None:
        return None
    redundant = _redundant(sequence, (evidence.judgement.highest or 0) > 1)
    if more_products(facts.trace, sequence):
        return None  # recomputes without attention, which nothing here finds
    inside, number, lengths = slice(*steps[:2]), len(steps[2]), steps[2]
    own = facts.kernels.time[sequence.rows]
    # Between steps the device may wait for long: what counts is eight times the usual wait.
    wait = 8 * int(median(np.maximum(sequence.time - own, 0))) + 1
    time = np.minimum(sequence.time, own + wait)
    recorded = median(lengths) / NS_PER_MS
    step_ms = median(timed_steps_ms) if timed_steps_ms else recorded

    def per_step(mask: Bool) -> float:
        return float(time[inside][mask[inside]].sum()) / NS_PER_MS / number

    again, (forward, backward) = sequence.again, sequence.spans()
    ends, sure = _left_out(facts, sequence)
    most = per_step(redundant) + min(per_step(ends), per_step(again & ~redundant))
    least = most if sure else per_step(redundant)
    # Between what is saved without early stop and with it: equally far from both, in parts.
    both = 2 * most * least / (most + least) if most else 0.0
    parts = [per_step(forward & ~again), per_step(again) - both, both, per_step(backward & ~again)]
    scale = (min(1.0, recorded / sum(parts)) if sum(parts) else 1.0) * (step_ms / recorded)
    other = max(0.0, step_ms - scale * sum(parts))
    before, again_ms, redundant_ms, after = (part * scale for part in parts)
    breakdown = Breakdown(before, again_ms, redundant_ms, after, 0.0, other)
    least, most = (1 - _DOUBT) * scale * least, (1 + _DOUBT) * scale * most
    bare = step_ms - breakdown.redundant - breakdown.recompute
    cost = Cost(
        step_ms=step_ms,
        step_source="timed" if timed_steps_ms else "trace",
        device="gpu",
        recompute_ms=breakdown.recompute + breakdown.redundant,
        redundant_recompute_ms=breakdown.redundant,
        repeated_collectives_ms=None,
        predicted_step_ms=step_ms - breakdown.redundant,
        predicted_low_ms=max(0.0, step_ms - most),
        predicted_high_ms=step_ms - least,
        saving_pct=100 * breakdown.redundant / step_ms,
        breakdown=breakdown,
        method="kernels",
        assumptions=_kernel_assumptions(facts, sure),
        step_low_ms=min(lengths) / NS_PER_MS if number > 1 else None,
        step_high_ms=max(lengths) / NS_PER_MS if number > 1 else None,
        steps=number,
    )
    low, high = bare - _DOUBT * (step_ms - bare), bare + _DOUBT * (step_ms - bare)
    without = replace(cost, bare_step_ms=bare, bare_low_ms=max(0.0, low), bare_high_ms=high)
    return without if again.any() else cost


def _redundant(sequence: KernelSequence, doubled: bool) -> Bool:
    """The kernels that ran again after the first time; recomputes get their ends, in place."""
    if not doubled:
        return np.zeros(len(sequence), np.bool_)
    _cut(sequence)
    _close(sequence.token, sequence.repeats)
    return sequence.beyond_first()


def _kernel_assumptions(facts: RecomputeFacts, sure: bool) -> tuple[str, ...]:
    operators = (facts.calls.kind == Kind.OP).any()
    shown = "The operators do not show recomputes" if operators else "No operators are in the trace"
    return (
        f"{shown}: kernels that repeat those around an attention forward, by name, count "
        "as recomputes. Their time, up to the next kernel, is subtracted; edges of "
        "recomputes may be off by a few kernels.",
        "The remaining recompute is assumed to stop early, because one in the trace does."
        if sure
        else "Kernels do not show whether the remaining recompute stops early. The prediction "
        "assumes half of that saving; the range covers none to all.",
        "Everything else includes the optimizer's time.",
    )


def _left_out(facts: RecomputeFacts, sequence: KernelSequence) -> tuple[Bool, bool]:
    """The kernels that early stop leaves out of recomputes, and whether one is seen to stop so.

    These are the last product and the kernels that add its result, or those that shorter recomputes
    leave out.
    """
    passes = facts.attention.passes if facts.attention is not None else []
    repeats = sequence.repeats
    found = np.zeros(len(repeats), np.bool_)
    highest = max((each.highest for each in passes), default=0)
    stops = np.flatnonzero((repeats[:-1] >= 0) & (repeats[1:] < 0)) + 1
    ran = np.bincount(repeats[repeats >= 0], minlength=len(repeats))
    # One of a run may seem to be longer than the others.
    lasts = repeats[stops - 1].tolist()
    doubled = [ran[max(0, last + 1 - _LONGEST_END) : last + 1].max() > 1 for last in lasts]
    stops = stops[np.array(doubled, np.bool_)]
    if highest < 2 or not len(stops):
        return found, False
    begun = np.unique(repeats[1:][(repeats[1:] >= 0) & (repeats[1:] != repeats[:-1] + 1)])
    is_backward = [event == BACKWARD for event in sequence.events]
    backward = sequence.at[np.array(is_backward, np.bool_)]
    # Of the recomputes before one backward, that which stops early, or went furthest.
    left_out: dict[int, tuple[int, int, int]] = {}
    for group, stop in zip(backward.searchsorted(stops).tolist(), stops.tolist(), strict=True):
        last = int(repeats[stop - 1])
        one = (_oftener(ran, last, begun), last, stop)
        left_out[group] = max(one, left_out.get(group, one))
    if 2 * sum(number > 0 for number, _, _ in left_out.values()) > len(left_out):
        for number, last, _ in left_out.values():
            found[last + 1 : last + 1 + number] = True
        return found, True
    names = facts.trace.names
    for _, _, stop in left_out.values():
        tail = sequence.token[max(0, stop - _LONGEST_END) : stop].tolist()
        product = next(
            (n for n, code in enumerate(tail[::-1], 1) if PRODUCT.search(names[code])), 0
        )
        found[stop - product : stop] = not any(
            _KEEPS_RESULT.search(names[code]) for code in tail[len(tail) - product :]
        )
    return found, False


def _cut(sequence: KernelSequence) -> None:
    """End each recompute before what another one begins with, in place.

    The backward pass goes on with products. One of them may have the name of the next kernel in the
    forward pass.
    """
    repeats, events, ran = sequence.repeats, sequence.events, sequence.again
    goes_on = np.zeros(len(repeats), np.bool_)
    goes_on[1:] = ran[1:] & ran[:-1] & (repeats[1:] == repeats[:-1] + 1)
    begun = np.isin(repeats, repeats[ran & ~goes_on]) & goes_on
    ends, cut = np.flatnonzero(~goes_on), -1
    for place, event, following in zip(
        sequence.at.tolist(), events, (*events[1:], ""), strict=True
    ):
        if event != RECOMPUTE or following == RECOMPUTE:
            continue
        stop = int(ends[ends.searchsorted(place + 1) :][:1].sum()) or len(repeats)
        if stop == cut:  # a counted kernel before this one has the first beginning behind it
            continue
        cut = stop
        cuts = np.flatnonzero(begun[place + 1 : stop])
        if len(cuts):
            repeats[place + 1 + int(cuts[0]) : stop] = -1


def _close(token: Int64, repeats: Int64) -> None:
    """Go on with a recompute up to where the next one begins, in place.

    The first of several may seem to begin earlier than the others, which then end too early. And a
    recompute may have a kernel that the forward pass has not, and go on behind it.
    """
    ran = repeats >= 0
    begun = set(repeats[1:][ran[1:] & (repeats[1:] != repeats[:-1] + 1)].tolist())

    def fill(row: int, stop: int, origin: int) -> None:
        while row < stop and repeats[row] < 0 < origin and origin not in begun:
            if token[row] != token[origin]:
                break
            repeats[row] = origin
            row, origin = row + 1, origin + 1

    for first in (np.flatnonzero(ran[:-1] & ~ran[1:]) + 1).tolist():
        following = np.flatnonzero(ran[first : first + _PIECE])[:1].tolist()
        origin = int(repeats[first - 1]) + 1
        fill(first, first + sum(following), origin)
        piece = token[origin : origin + _PIECE]
        if repeats[first] < 0 and np.array_equal(token[first + 1 : first + 1 + _PIECE], piece):
            fill(first + 1, len(token), origin)


def _oftener(ran: Int64, last: int, begun: Int64) -> int:
    """How many kernels behind the last of a recompute ran again, and less often than it did.

    They end where another recompute begins (``begun``). 0 where they are too many for what early
    stop leaves out.
    """
    stop = int(begun[begun.searchsorted(last + 1) :][:1].sum()) or len(ran)
    after = ran[last + 1 : min(stop, last + 2 + _LONGEST_END)]
    fewer = (after > 0) & (after < ran[last])
    number = len(fewer) if fewer.all() else int(np.argmin(fewer))
    return number if number <= _LONGEST_END else 0


def _steps(facts: RecomputeFacts, sequence: KernelSequence) -> tuple[int, int, list[int]] | None:
    """First kernel, end, and the lengths of whole steps, ns; ``None`` where they are unknown."""
    evidence = facts.attention
    if evidence is not None and evidence.steps_marked:
        spans = [step.span for step in evidence.steps]
        launch = facts.kernels.launch[sequence.rows]
        known = launch >= 0
        begun = np.where(known, facts.calls.start[np.maximum(launch, 0)], -1)
        inside = (begun >= spans[0].start) & (begun < spans[-1].end)
        if not inside.any():
            return None
        places = np.flatnonzero(inside)
        first, last = int(places[0]), int(places[-1]) + 1
        busy = int(sequence.time[first : last - 1].sum()) // len(spans)
        lengths = [span.end - span.start for span in spans]
        # Where hosts run ahead of the device, its kernels say how long steps take.
        return first, last, lengths if median(lengths) > 0.9 * busy else [busy] * len(spans)
    period = _period(sequence.token)
    if period is None:
        return None
    number = len(sequence.token) // period
    starts = sequence.start[: number * period : period].tolist()
    ends = [*starts[1:], int(sequence.start[number * period - 1])]
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    whole = lengths[:-1] if number > 1 else lengths
    return 0, len(whole) * period, whole


def _period(token: Int64) -> int | None:
    """After how many kernels the sequence returns; ``None`` where it does not, or only once."""
    values, counts = np.unique(token, return_counts=True)
    for value in values[counts.argsort(kind="stable")].tolist():
        places = np.flatnonzero(token == value)
        if len(places) < 2:
            continue
        for period in sorted(set((places[1:] - places[0]).tolist()))[:_MOST_PERIODS]:
            if (token[:-period] == token[period:]).mean() >= _SAME:
                return int(period)
        return None
    return None
