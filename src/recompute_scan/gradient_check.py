"""Gradients of two runs of one script, compared: with its checkpoints and without them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from recompute_scan.faithful import Sampled
from recompute_scan.result import GradientDistance, Gradients

_WORST = 10
# A gradient sums over many operators, each of which rounds.
_ROUNDINGS = 30
# As far as the script's own gradients are from run to run, times this, nothing is told.
_FAR = 10


def compare_gradients(
    mine: Sequence[Sampled], others: Sequence[Sampled], again: Sequence[Sampled] = ()
) -> Gradients:
    """How far gradients and buffers after the first step are from those of another run.

    Args:
        mine: Of the script as it is.
        others: Of the run to compare with.
        again: Of a second run of the script as it is; empty where there was none.
    """
    theirs = {(one.name, one.is_buffer): one for one in others}
    twice = {(one.name, one.is_buffer): one for one in again}
    pairs = [(one, theirs[key]) for one in mine if (key := (one.name, one.is_buffer)) in theirs]
    if not pairs:
        return Gradients("not-seen")
    apart = [(one, one.distance(other)) for one, other in pairs]
    repeats = [
        one.distance(twice[key]) for one, _ in pairs if (key := (one.name, one.is_buffer)) in twice
    ]
    repeat = max(repeats, default=0.0)
    largest = max(distance for _, distance in apart)
    beyond = [(one, d) for one, d in apart if d > max(_ROUNDINGS * one.rounding, _FAR * repeat)]
    status: Literal["equal", "rounding", "different", "not-repeatable"]
    if largest == 0.0:
        status = "equal"
    elif beyond:
        status = "different"
    else:
        status = "rounding" if repeat == 0.0 else "not-repeatable"
    worst = sorted(apart, key=lambda pair: -pair[1])[:_WORST]
    return Gradients(
        status,
        compared=len(pairs),
        worst=tuple(
            GradientDistance(one.name, one.is_buffer, d if math.isfinite(d) else None)
            for one, d in worst
            if d
        ),
    )


def worst_of(several: Sequence[Gradients]) -> Gradients:
    """One answer for several runs that each had other checkpoints taken out: the worst, with the
    largest distance of each gradient.
    """
    order = ("not-seen", "equal", "rounding", "not-repeatable", "different")
    distances: dict[tuple[str, bool], GradientDistance] = {}
    for one in (one for each in several for one in each.worst):
        known = distances.get((one.name, one.is_buffer))
        if known is None or _far(one) > _far(known):
            distances[one.name, one.is_buffer] = one
    return Gradients(
        max((each.status for each in several), key=order.index),
        compared=max(each.compared for each in several),
        worst=tuple(sorted(distances.values(), key=_far, reverse=True)[:_WORST]),
    )


def _far(one: GradientDistance) -> float:
    return math.inf if one.distance is None else one.distance
