"""The verdict and the counts on compiled trainings, against operators counted as they ran."""

from __future__ import annotations

import pytest

from .answers import miscounted, said_of, truth_of
from .cases import CASES, Case

_QUICK = {"model, checkpoints in it", "layers, in and around", "model"}


def _marked(case: Case) -> object:
    return pytest.param(case, id=case.name, marks=() if case.name in _QUICK else pytest.mark.slow)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_the_answer_is_right(case: Case) -> None:
    truth, said = truth_of(case), said_of(case)
    assert said.verdict == case.verdict
    assert not said.findings or all(one.code != "RS007" for one in said.findings)
    if case.backend != "inductor":
        assert miscounted(said, truth) == {}
    # The compiler's graphs and the operators in the trace are two counts.
    assert said.confidence == "high"
