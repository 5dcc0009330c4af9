"""Intervals of one thread become a forest: held against a stack that does it call by call."""

import random
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recompute_scan.trace import calls as model
from recompute_scan.trace import nesting
from recompute_scan.trace.calls import Calls, nest
from recompute_scan.trace.columns import Kind, Trace
from tests.effort import examples
from tests.trace_builder import launch, loaded, op, thread

Interval = tuple[int, int]  # start, end; ns


def trace_of(*threads: list[Interval]) -> Trace:
    """A trace of operators with these intervals, in this order."""
    rows = [(number, *interval) for number, one in enumerate(threads) for interval in one]
    number, start, end = np.array(rows, np.int64).reshape(-1, 3).T
    size = len(rows)
    nothing = np.full(size, -1, np.int64)
    return Trace(
        name=np.zeros(size, np.int32),
        kind=np.full(size, Kind.OP, np.int8),
        thread=number.astype(np.int32),
        ts=start,
        dur=end - start,
        sequence=nothing,
        correlation=nothing,
        stream=nothing.astype(np.int32),
        dims=np.zeros(size, np.int32),
        names=("op",),
        threads=tuple(("1", str(code)) for code in range(len(threads))),
        signatures=("",),
    )


def by_stack(intervals: list[Interval]) -> dict[int, int]:
    """Parent of each properly nested interval, by position; -1 at the top."""
    parents: dict[int, int] = {}
    still_open: list[int] = []
    order = sorted(range(len(intervals)), key=lambda i: (intervals[i][0], -intervals[i][1], i))
    for row in order:
        start = intervals[row][0]
        while still_open and intervals[still_open[-1]][1] <= start:
            still_open.pop()
        parents[row] = still_open[-1] if still_open else -1
        still_open.append(row)
    return parents


def parents_of(calls: Calls) -> dict[int, int]:
    """The same by event, from the program's forest."""
    return {
        int(calls.event[row]): int(calls.event[above]) if above >= 0 else -1
        for row, above in enumerate(calls.parent)
    }


@st.composite
def forests(draw: st.DrawFn, first: int = 0, last: int = 60, depth: int = 0) -> list[Interval]:
    """Properly nested intervals, many of them empty or sharing a start or an end."""
    found: list[Interval] = []
    at = first
    for _ in range(draw(st.integers(0, 4 if depth < 4 else 0))):
        start = draw(st.integers(at, last))
        end = draw(st.integers(start, last))
        found.append((start, end))
        if end > start:
            found.extend(draw(forests(start, end, depth + 1)))
        at = end
    return found


def nested(trace: Trace, piece: int) -> Calls:
    """The forest by time alone, built from so many calls at a time."""
    with patch.object(nesting, "_PIECE", piece), patch.object(model, "are_whole", lambda *_: False):
        calls = nest(trace)
        assert_consistent(calls)
    return calls


pieces = st.sampled_from([1, 2, 5, 1000])


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(forests(), min_size=1, max_size=3), st.randoms(use_true_random=False), pieces)
def test_nested_intervals_give_the_forest_of_a_stack(
    threads: list[list[Interval]], chance: random.Random, piece: int
) -> None:
    for one in threads:
        chance.shuffle(one)
    calls = nested(trace_of(*threads), piece)
    expected: dict[int, int] = {}
    for one in threads:
        base = len(expected)
        expected |= {base + row: up + base if up >= 0 else -1 for row, up in by_stack(one).items()}
    assert parents_of(calls) == expected
    assert calls.overruns == 0


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 5_000)), max_size=14), pieces)
def test_crossing_intervals_are_cut_until_they_nest(
    pairs: list[tuple[int, int]], piece: int
) -> None:
    intervals = [(start, start + length) for start, length in pairs]
    calls = nested(trace_of(intervals), piece)
    original = np.array([intervals[event] for event in calls.event]).reshape(-1, 2)
    assert (calls.start == original[:, 0]).all()
    assert (calls.end <= original[:, 1]).all()
    # What is left is nested, and is the forest of a stack.
    left = list(zip(calls.start.tolist(), calls.end.tolist(), strict=True))
    above = calls.parent >= 0
    assert (calls.end[above] <= calls.end[calls.parent[above]]).all()
    assert [by_stack(left)[row] for row in range(len(left))] == calls.parent.tolist()
    # Something is counted just when something crossed.
    crossed = any(one[0] < other[0] < one[1] < other[1] for one in intervals for other in intervals)
    assert (calls.overruns > 0) == crossed == bool((calls.end < original[:, 1]).any())


def assert_consistent(calls: Calls) -> None:
    """Depth, size and the levels say the same as the parents; descendants stand behind a call."""
    for row, above in enumerate(calls.parent):
        assert calls.depth[row] == (calls.depth[above] + 1 if above >= 0 else 0)
        inside = [other for other in range(len(calls)) if row in ancestors(calls, other)]
        assert inside == list(range(row + 1, row + 1 + int(calls.size[row])))
    # From the top and from the bottom: every call once, after or before all that hold it.
    down = [int(row) for rows in calls.levels() for row in rows]
    up = [int(row) for rows in calls.levels_up() for row in rows]
    assert sorted(down) == list(range(len(calls)))
    assert sorted(up) == np.flatnonzero(calls.parent >= 0).tolist()
    for order, before in ((down, 1), (up, -1)):
        place = {row: at for at, row in enumerate(order)}
        for row in up:
            if (above := int(calls.parent[row])) in place:
                assert before * place[above] < before * place[row]


def ancestors(calls: Calls, row: int) -> list[int]:
    found = []
    while (row := int(calls.parent[row])) >= 0:
        found.append(row)
    return found


def test_a_call_that_outlives_its_parent_ends_with_it() -> None:
    calls = nest(trace_of([(0, 10_000), (5_000, 10_400), (6_000, 7_000)]))
    assert calls.parent.tolist() == [-1, 0, 1]
    assert calls.end.tolist() == [10_000, 10_000, 7_000]
    assert calls.overruns == 1


def test_neighbours_whose_rounded_times_overlap_stay_neighbours() -> None:
    calls = nest(trace_of([(0, 10_000), (9_750, 20_000), (12_000, 13_000)]))
    assert calls.parent.tolist() == [-1, -1, 1]
    assert calls.end.tolist() == [9_750, 20_000, 13_000]
    assert calls.overruns == 1


def test_what_stands_behind_a_crossing_keeps_its_time() -> None:
    calls = nest(trace_of([(0, 10_000), (5_000, 15_000), (12_000, 14_000)]))
    assert calls.parent.tolist() == [-1, 0, -1]
    assert calls.duration.tolist() == [10_000, 5_000, 2_000]


def test_launches_nest_among_the_operators_and_kernels_do_not() -> None:
    calls = nest(loaded(thread(op("aten::mm", launch("gemm")))))
    assert [calls.names[code] for code in calls.name] == ["aten::mm", "cudaLaunchKernel"]
    assert calls.parent.tolist() == [-1, 0]


def test_absolute_integer_times_nest_exactly() -> None:
    # Microseconds since 1970, as torch 1.8 wrote them: no float holds their nanoseconds.
    start = 1_611_085_000_000_000.0
    inside = [op("aten::empty", us=1) for _ in range(50)]
    calls = nest(loaded(thread(op("aten::conv2d", *inside), start=start)))
    assert calls.overruns == 0
    assert set(calls.parent.tolist()) == {-1, 0}
