"""Our own ways to distinct values and percentiles are NumPy's, without loading numpy.ma."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as arrays_of

from recompute_scan.arrays import (
    among,
    changes,
    distinct,
    gaps,
    median,
    percentile,
    ranked,
    sizes,
    split,
    tally,
    true_at,
)

TRACES = Path(__file__).parent.parent / "traces"


@given(arrays_of(np.int64, st.integers(0, 40), elements=st.integers(-5, 5)))
def test_distinct_values_are_numpys(values: np.ndarray) -> None:
    assert distinct(values).tolist() == np.unique(values).tolist()


_FEW = arrays_of(np.int64, st.integers(0, 40), elements=st.integers(-9, 9))


@given(_FEW, _FEW)
def test_what_is_among_others_is_numpys(values: np.ndarray, wanted: np.ndarray) -> None:
    assert among(values, wanted).tolist() == np.isin(values, wanted).tolist()


@given(_FEW)
def test_ranks_and_tallies_are_numpys(values: np.ndarray) -> None:
    for found, expected in (
        (ranked(values), np.unique(values, return_inverse=True)),
        (ranked(values + 10), np.unique(values + 10, return_inverse=True)),
        (tally(values), np.unique(values, return_counts=True)),
    ):
        assert [one.tolist() for one in found] == [one.tolist() for one in expected]


@given(_FEW, st.data())
def test_changes_and_runs_are_numpys(values: np.ndarray, data: st.DataObject) -> None:
    other = data.draw(arrays_of(np.int64, len(values), elements=st.integers(0, 1)))
    assert gaps(values).tolist() == np.diff(values).tolist()
    assert true_at(values > 0).tolist() == np.flatnonzero(values > 0).tolist()
    differ = (np.diff(values) != 0) | (np.diff(other) != 0)
    begins = true_at(changes(values, other))
    if not len(values):
        assert not len(begins)
        return
    assert begins.tolist() == [0, *(np.flatnonzero(differ) + 1).tolist()]
    assert sizes(begins, len(values)).tolist() == np.diff(begins, append=len(values)).tolist()
    runs = np.split(values, begins[1:])
    assert [one.tolist() for one in split(values, begins)] == [one.tolist() for one in runs]


@given(arrays_of(np.float64, st.integers(1, 40), elements=st.floats(-1e9, 1e9)), st.floats(0, 100))
def test_percentiles_are_numpys_to_the_last_bit(values: np.ndarray, percent: float) -> None:
    assert percentile(values, percent) == np.percentile(values, percent)


@given(arrays_of(np.float64, st.integers(1, 40), elements=st.floats(-1e9, 1e9)))
def test_medians_are_numpys_to_the_last_bit(values: np.ndarray) -> None:
    assert median(values) == np.median(values)


@given(st.lists(st.integers(0, 2**62), min_size=1))
def test_medians_of_whole_numbers_too(values: list[int]) -> None:
    assert median(values) == np.median(values)


def test_an_analysis_loads_no_masked_arrays() -> None:
    code = (
        "import sys; from recompute_scan.cli import main; "
        "status = main(['analyze', sys.argv[1], '--format', 'json']); "
        "sys.exit(status or 'numpy.ma' in sys.modules)"
    )
    for trace in ("plain_twice", "doubled_llama_fsdp", "public/h100-nanogpt-compiled.json.gz"):
        command = [sys.executable, "-c", code, str(TRACES / trace)]
        done = subprocess.run(command, capture_output=True, check=False)
        assert done.returncode == 0, trace
