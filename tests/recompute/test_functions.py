"""Checkpoint functions are known by what their nodes do, whatever their names."""

from __future__ import annotations

import functools

import pytest

from recompute_scan.pipeline import analyse
from recompute_scan.result import Result
from tests.cases.case import Case
from tests.cases.functions import FUNCTIONS
from tests.cases.recorded import recorded

every_case = pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case.name)


@functools.cache
def answer(name: str) -> Result:
    return analyse([recorded(name)[0]])


@every_case
def test_the_count_is_the_truth_under_any_name(case: Case) -> None:
    _, truth = recorded(case.name)
    result = answer(case.name)
    assert truth.verdict in (None, result.verdict)
    assert result.recompute_per_backward == max(map(max, truth.multiplicity()))
