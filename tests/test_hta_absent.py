"""Without Holistic Trace Analysis nothing fails but what asks for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import recompute_scan as rs
from recompute_scan.errors import UsageError
from recompute_scan.pipeline import analyse

TRACE = Path(__file__).parents[1] / "traces" / "public" / "mi300x-resnet-checkpointed.json.gz"


@pytest.fixture(autouse=True)
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("hta.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hta", None)


def test_the_analysis_goes_on_and_says_so() -> None:
    result = analyse([TRACE], hta=True)
    assert result.verdict == "full"
    assert result.hta is None
    assert any("Holistic Trace Analysis" in warning for warning in result.warnings)


def test_who_asks_for_its_trace_is_told_what_to_install() -> None:
    with pytest.raises(UsageError, match="E212"):
        rs.analyze(TRACE).to_hta()
