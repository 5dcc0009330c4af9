"""Multiplicity: recomputes per backward pass, and which of them are redundant."""

import numpy as np
import pytest

from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.alignment import Counts, host_times
from recompute_scan.recompute.study import study
from recompute_scan.trace import load
from tests.cases.recorded import recorded
from tests.recompute.training import checkpointed_step, run
from tests.trace_builder import studied, thread


def test_only_complete_steps_count() -> None:
    unfinished = run(900)
    facts = studied(thread(checkpointed_step(0), checkpointed_step(1), *unfinished))
    assert facts.complete.tolist() == [True, True]
    assert facts.counts.counted.sum() == 24
    assert facts.counts.step[-4:].tolist() == [-1] * 4


def counts_of(m: list[float], weight: list[int]) -> Counts:
    size = len(weight)
    zeros, ones = np.zeros(size, np.int64), np.ones(size, np.bool_)
    return Counts(
        rows=np.arange(size),
        m=np.array(m),
        runs=np.array(m, np.int64),
        designed=zeros,
        weight=np.array(weight, np.int64),
        recompute_ns=np.zeros(size),
        redundant_ns=np.zeros(size),
        counted=ones,
        step=zeros,
        batch=zeros,
        flight=zeros,
        redundant_rows=zeros[:0],
    )


@pytest.mark.parametrize(
    ("m", "weight", "highest", "mean"),
    [
        ([0, 0], [50, 50], 0.0, 0.0),
        ([1, 2], [50, 50], 2.0, 1.5),
        ([1, 2], [995, 5], 1.0, 1.005),  # less than 1 % of the time does not matter
        ([1, 2], [99, 1], 2.0, 1.01),  # 1 % does
        ([1, 3, 2], [9_890, 60, 50], 2.0, 1.017),  # 3 alone does not, 2 or more together do
        ([0, 1], [99_900, 1], 1.0, 1 / 99_901),  # one operator waited for the machine
        ([1, 2], [0, 0], 2.0, 1.5),  # no times at all: operators count alike
    ],
)
def test_highest_that_matters_and_mean(
    m: list[float], weight: list[int], highest: float, mean: float
) -> None:
    counts = counts_of(m, weight)
    assert counts.highest(counts.counted) == highest
    assert counts.mean(counts.counted) == pytest.approx(mean)


@pytest.mark.parametrize("name", ["tiles_in_n", "tiles_in_r", "n_inside"])
def test_a_recompute_takes_no_time_of_the_passes_between_its_pieces(name: str) -> None:
    facts = study(load(recorded(name)[0]))
    calls, alignment = facts.calls, facts.alignment
    times = host_times(alignment)
    between = 0
    for each, time in zip(alignment.recomputes, times.tolist(), strict=True):
        first, last = int(each.again[0]), int(each.again[-1])
        inside = [
            row
            for row in range(first, last)
            if calls.called(row).startswith(vocabulary.ENGINE)
            and calls.parent[row] == calls.parent[first]
        ]
        passes = int(calls.duration[inside].sum())
        assert time == int(calls.end[last] - calls.start[first]) - passes
        between += passes
    assert (between > 0) == name.startswith("tiles")
