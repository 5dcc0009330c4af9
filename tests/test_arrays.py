"""The array helpers that NumPy lacks."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as arrays_of

from recompute_scan.numpy_tools import changes, median, places_of, split

_FEW = arrays_of(np.int64, st.integers(0, 40), elements=st.integers(-9, 9))


@given(_FEW, st.data())
def test_changes_and_runs(values: np.ndarray, data: st.DataObject) -> None:
    other = data.draw(arrays_of(np.int64, len(values), elements=st.integers(0, 1)))
    begins = np.flatnonzero(changes(values, other))
    rows = list(zip(values.tolist(), other.tolist(), strict=True))
    expected = [row for row, pair in enumerate(rows) if not row or pair != rows[row - 1]]
    assert begins.tolist() == expected
    runs = [one.tolist() for one in split(values, begins)]
    assert [value for run in runs for value in run] == values.tolist()
    assert [len(run) for run in runs] == np.diff([*expected, len(rows)]).tolist()


@given(_FEW)
def test_places(values: np.ndarray) -> None:
    found = {value: places.tolist() for value, places in places_of(values).items()}
    expected = {value: np.flatnonzero(values == value).tolist() for value in sorted({*values})}
    assert found == expected
    assert [*found] == [*expected]


def test_a_median_of_nothing_is_not_a_number() -> None:
    assert median([3, 1]) == 2
    assert math.isnan(median([]))
