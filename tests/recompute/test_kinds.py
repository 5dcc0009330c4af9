"""Layers of two kinds of which one is checkpointed, and of whole cells in one operator each."""

from pathlib import Path

import pytest

from recompute_scan.analysis.pipeline import analyse
from tests.cases.attention_free import RNNS
from tests.cases.case import Case, record
from tests.cases.kinds import KINDS
from tests.cases.kinds_short import KINDS_SHORT


@pytest.mark.parametrize("case", (*KINDS, *KINDS_SHORT, *RNNS), ids=lambda case: case.name)
def test_a_part_of_the_layers_is_not_all_of_them(case: Case, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    truth = record(case, trace)
    result = analyse([trace])
    assert result.verdict == truth.verdict
    assert result.recompute_per_backward == max(max(each) for each in truth.multiplicity())
