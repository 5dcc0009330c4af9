"""Multiplicity: recomputes per backward pass, and which of them are redundant."""

from __future__ import annotations

import numpy as np
import pytest

from recompute_scan.recompute.counts import Counts
from recompute_scan.recompute.study import RecomputeFacts
from tests.recompute.training import (
    checkpointed_step,
    gradients,
    no_grad,
    reentrant,
    run,
    study_step,
)
from tests.trace_builder import node, op, studied, thread


def multiplicity(facts: RecomputeFacts) -> list[float]:
    return [float(m) for m in facts.counts.multiplicity[facts.counts.counted]]


@pytest.mark.parametrize("times", [0, 1, 2, 3])
def test_multiplicity_is_recomputes_per_backward(times: int) -> None:
    facts = studied(thread(checkpointed_step(0, layers=1, recomputes={0: times})))
    counts = facts.counts
    assert multiplicity(facts) == [times] * 4
    assert len(counts.redundant_rows) == 4 * max(0, times - 1)
    # Each operator takes 12 µs here, and one passes between them.
    assert counts.again.sum() == pytest.approx(51_000 * times)
    assert counts.redundant.sum() == pytest.approx(51_000 * max(0, times - 1))


def test_two_backward_passes_through_one_forward_recompute_once_each() -> None:
    forward = run(0)
    facts = study_step(*forward, *gradients(forward, run(50)), *gradients(forward, run(60)))
    assert facts.counts.runs.tolist() == [2, 2, 2, 2]
    assert multiplicity(facts) == [1, 1, 1, 1]
    assert len(facts.counts.redundant_rows) == 0


def test_an_outer_reentrant_function_runs_the_inner_one_again() -> None:
    """Reentrant around reentrant: the inner function's forward, then its own recompute."""
    outer = op("CheckpointFunction", reentrant(0, run(0)).again(), seq=5)
    backward = node(
        "CheckpointFunctionBackward",
        op("CheckpointFunction", *no_grad(run(0)), seq=40),
        node("CheckpointFunctionBackward", *run(50), *gradients(run(50)), seq=40),
        seq=5,
    )
    facts = study_step(outer, backward)
    assert multiplicity(facts) == [2, 2, 2, 2]
    assert [recompute.inner_function for recompute in facts.alignment.recomputes] == [True, False]


def test_only_complete_steps_count() -> None:
    unfinished = run(900)
    facts = studied(thread(checkpointed_step(0), checkpointed_step(1), *unfinished))
    assert facts.complete.tolist() == [True, True]
    assert facts.counts.counted.sum() == 24
    assert facts.counts.step[-4:].tolist() == [-1] * 4


def test_each_step_and_each_forward_pass_has_its_number() -> None:
    one, two = run(0), run(20)
    facts = study_step(*one, *gradients(one, run(50)), *two, *gradients(two))
    assert facts.counts.batch.tolist() == [0] * 4 + [1] * 4
    assert facts.counts.runs.tolist() == [1] * 4 + [0] * 4


def counts_of(multiplicity: list[float], weight: list[int]) -> Counts:
    size = len(weight)
    zeros, ones = np.zeros(size, np.int64), np.ones(size, np.bool_)
    return Counts(
        rows=np.arange(size),
        multiplicity=np.array(multiplicity),
        runs=np.array(multiplicity, np.int64),
        weight=np.array(weight, np.int64),
        again=np.zeros(size),
        redundant=np.zeros(size),
        counted=ones,
        step=zeros,
        batch=zeros,
        redundant_rows=zeros[:0],
    )


@pytest.mark.parametrize(
    ("multiplicity", "weight", "highest", "mean"),
    [
        ([0, 0], [50, 50], 0.0, 0.0),
        ([1, 2], [50, 50], 2.0, 1.5),
        ([1, 2], [995, 5], 1.0, 1.005),  # less than 1 % of the time does not matter
        ([1, 2], [99, 1], 2.0, 1.01),  # 1 % does
        ([1, 3, 2], [9_890, 60, 50], 2.0, 1.017),  # 3 alone does not, 2 or more together do
        ([1, 2], [0, 0], 2.0, 1.5),  # no times at all: operators count alike
    ],
)
def test_highest_that_matters_and_mean(
    multiplicity: list[float], weight: list[int], highest: float, mean: float
) -> None:
    counts = counts_of(multiplicity, weight)
    assert counts.highest(counts.counted) == highest
    assert counts.mean(counts.counted) == pytest.approx(mean)
