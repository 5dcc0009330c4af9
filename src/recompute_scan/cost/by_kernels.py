"""What recomputes cost where a trace has kernels alone: by the sequence in which they ran.

Which kernels are a recompute's says :mod:`recompute_scan.recompute.kernel_order`.

What is saved is the device's time from the start of each redundant kernel to that of the next on
its stream: where the device is the limit, the kernel; where the host is, the time between launches.
The step is the range that marks it, or the period after which the whole sequence returns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from recompute_scan.numpy_tools import median
from recompute_scan.recompute.attention_kernels import PRODUCT, more_products
from recompute_scan.recompute.kernel_order import (
    BACKWARD,
    RECOMPUTE,
    KernelSequence,
    beyond_first,
    kernel_sequence,
    recomputed,
    spans_beside,
    with_recomputes,
)
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.result import Breakdown, Cost
from recompute_scan.trace.columns import Bool, Int64, Kind

_NS_PER_MS = 1e6
# The sequence returns after a period if this share of it does, in the same places.
_SAME = 0.98
# What either end of the prediction may be off by, as a share of what is saved: the edges of
# recomputes.
_DOUBT = 0.1
_MOST_PERIODS = 64
# Kernels of a last product and what follows it.
_LONGEST_END = 4
# Of a recompute in two pieces, or between two: fewer kernels may be a gradient's own.
_PIECE = 3
# Autograd saves what they make: behind them, early stop leaves out what is next.
_KEEPS_RESULT = re.compile(r"dropout|softmax|sigmoid|tanh|norm", re.I)


def price_by_kernels(facts: RecomputeFacts, timed_steps_ms: Sequence[float]) -> Cost | None:
    """The cost of recomputes by kernels alone; ``None`` where attention or the step is not told.

    Args:
        facts: What ran again, at the level of kernels.
        timed_steps_ms: Durations of unprofiled steps, ms; empty where there are none.
    """
    evidence = facts.attention
    if evidence is None or evidence.judgement.verdict == "inconclusive":
        return None
    sequence = kernel_sequence(facts.trace, facts.kernels, evidence.rows)
    at = sequence.places(evidence.rows)
    events = with_recomputes(evidence.events, evidence.passes)
    steps = _steps(facts, sequence)
    if events is None or steps is None:
        return None
    highest = int(evidence.judgement.highest or 0)
    repeats = recomputed(sequence, at, events, highest)
    redundant = np.zeros(len(repeats), np.bool_)
    if highest > 1:
        _cut(repeats, at, events)
        _close(sequence.token, repeats)
        redundant = beyond_first(repeats, at, events)
    again = repeats >= 0
    if more_products(facts.trace, sequence, at, events, again):
        return None  # recomputes without attention, which nothing here finds
    first, last, lengths = steps
    inside, number = slice(first, last), len(lengths)
    time = np.minimum(sequence.time, _usual_wait(facts, sequence))
    recorded = median(lengths) / _NS_PER_MS
    step_ms = median(timed_steps_ms) if timed_steps_ms else recorded

    def per_step(mask: Bool) -> float:
        return float(time[inside][mask[inside]].sum()) / _NS_PER_MS / number

    size = len(sequence.rows)
    forward, backward = spans_beside(at, events, size)
    least = per_step(redundant)
    ends, sure = _left_out(facts, sequence, repeats, at, events)
    most = least + min(per_step(ends), per_step(again & ~redundant))
    if sure:
        least = most
    # Between what is saved without early stop and with it: equally far from both, in parts.
    redundant_ms = 2 * most * least / (most + least) if most else 0.0
    recompute_ms = per_step(again) - redundant_ms
    forward_ms = per_step(forward & ~again)
    backward_ms = per_step(backward & ~again)
    parts = [forward_ms, recompute_ms, redundant_ms, backward_ms]
    scale = min(1.0, recorded / sum(parts)) if sum(parts) else 1.0
    scale *= step_ms / recorded
    forward_ms, recompute_ms, redundant_ms, backward_ms = (part * scale for part in parts)
    least, most = (1 - _DOUBT) * scale * least, (1 + _DOUBT) * scale * most
    after = step_ms - redundant_ms
    bare = after - recompute_ms
    operators = (facts.calls.kind == Kind.OP).any()
    shown = "The operators do not show it" if operators else "No operators are in the trace"
    spread = (min(lengths) / _NS_PER_MS, max(lengths) / _NS_PER_MS) if number > 1 else (None, None)
    return Cost(
        step_ms=step_ms,
        step_source="timed" if timed_steps_ms else "trace",
        device="gpu",
        recompute_ms=recompute_ms + redundant_ms,
        redundant_recompute_ms=redundant_ms,
        repeated_collectives_ms=None,
        predicted_step_ms=after,
        predicted_low_ms=max(0.0, step_ms - most),
        predicted_high_ms=step_ms - least,
        saving_pct=100 * redundant_ms / step_ms,
        breakdown=Breakdown(
            forward=forward_ms,
            recompute=recompute_ms,
            redundant=redundant_ms,
            backward=backward_ms,
            optimizer=0.0,
            other=max(0.0, step_ms - scale * sum(parts)),
        ),
        method="kernels",
        assumptions=(
            f"{shown}: recomputes are runs of kernels that repeat those around an attention "
            "forward, by name. What they take, up to the next kernel, is taken off; edges of "
            "recomputes may be off by a few kernels.",
            "The recompute that stays is taken to stop early, as one is seen to do."
            if sure
            else "Whether the recompute that stays stops early is not in kernels: half of what "
            "that would save is taken off, and the range is from nothing of it to all.",
            "The optimizer's time is in everything else.",
        ),
        bare_step_ms=bare if again.any() else None,
        bare_low_ms=max(0.0, bare - _DOUBT * (step_ms - bare)) if again.any() else None,
        bare_high_ms=bare + _DOUBT * (step_ms - bare) if again.any() else None,
        step_low_ms=spread[0],
        step_high_ms=spread[1],
        steps=number,
    )


def _left_out(
    facts: RecomputeFacts,
    sequence: KernelSequence,
    repeats: Int64,
    at: Int64,
    events: list[str],
) -> tuple[Bool, bool]:
    """What early stop leaves out at the end of recomputes, and whether one is seen to stop so.

    That is the last product, and what adds its result; or what shorter recomputes leave out.
    """
    passes = facts.attention.passes if facts.attention is not None else []
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
    backward = at[np.array([event == BACKWARD for event in events], np.bool_)]
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


def _cut(repeats: Int64, at: Int64, events: Sequence[str]) -> None:
    """End each recompute before what another one begins with, in place.

    The backward pass goes on with products, and one of these may have the name of what comes next
    in the forward pass.
    """
    ran = repeats >= 0
    goes_on = np.zeros(len(repeats), np.bool_)
    goes_on[1:] = ran[1:] & ran[:-1] & (repeats[1:] == repeats[:-1] + 1)
    begun = np.isin(repeats, repeats[ran & ~goes_on]) & goes_on
    ends, cut = np.flatnonzero(~goes_on), -1
    for place, event, following in zip(at.tolist(), events, (*events[1:], ""), strict=True):
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


def _usual_wait(facts: RecomputeFacts, sequence: KernelSequence) -> Int64:
    """The most that a kernel's time counts: its own, and what usually follows it, eight times.

    Between steps the device may wait for long.
    """
    own = (facts.kernels.end - facts.kernels.start)[sequence.rows]
    gap = np.maximum(sequence.time - own, 0)
    usual: Int64 = own + 8 * int(median(gap)) + 1
    return usual


def _steps(facts: RecomputeFacts, sequence: KernelSequence) -> tuple[int, int, list[int]] | None:
    """First kernel, end, and the lengths of whole steps, ns; ``None`` where nothing tells them."""
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
