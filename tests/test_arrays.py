"""Our own ways to distinct values and percentiles are NumPy's, without loading numpy.ma."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as arrays_of

from recompute_scan.arrays import among, distinct, median, percentile

TRACES = Path(__file__).parent.parent / "traces"


@given(arrays_of(np.int64, st.integers(0, 40), elements=st.integers(-5, 5)))
def test_distinct_values_are_numpys(values: np.ndarray) -> None:
    assert distinct(values).tolist() == np.unique(values).tolist()


_FEW = arrays_of(np.int64, st.integers(0, 40), elements=st.integers(-9, 9))


@given(_FEW, _FEW)
def test_what_is_among_others_is_numpys(values: np.ndarray, wanted: np.ndarray) -> None:
    assert among(values, wanted).tolist() == np.isin(values, wanted).tolist()


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
