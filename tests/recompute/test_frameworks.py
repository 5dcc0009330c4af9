"""Checkpoint functions of other libraries, where these are installed."""

import contextlib
import importlib.util
from pathlib import Path

import pytest

from recompute_scan import trace
from recompute_scan.recompute.study import study
from tests.cases.case import record
from tests.cases.frameworks import FRAMEWORKS
from tests.cases.marked import annotating


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", FRAMEWORKS)
def test_the_answer_is_the_truth(package: str, tmp_path: Path) -> None:
    if not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed; see benchmarks/results/correctness.md")
    for case in FRAMEWORKS[package]:
        for marked in (False, True):
            with annotating() if marked else contextlib.nullcontext():
                truth = record(case, tmp_path / "trace.json.gz")
            facts = study(trace.load(tmp_path / "trace.json.gz"))
            highest = max(max(layer) for layer in truth.multiplicity())
            assert facts.judgement.verdict == (case.verdict or "full"), case.name
            assert facts.judgement.highest == highest, case.name
            assert facts.annotations is None or facts.annotations.disagreeing == 0, case.name
