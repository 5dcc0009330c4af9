"""Without Holistic Trace Analysis nothing fails but what asks for it."""

import sys
from pathlib import Path

import pytest

import recompute_scan as rs
from recompute_scan.analysis.pipeline import analyse
from recompute_scan.errors import UsageError
from recompute_scan.report.render import render_text

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
    (said,) = [one for one in result.warnings if "Holistic Trace Analysis" in one]
    assert said.startswith("Holistic Trace Analysis is not installed, so it was left out (")
    assert said.endswith('to add it: in the checkout of recompute-scan: pip install ".[hta]"')
    text = render_text(result, color=False)
    assert "\\n" not in text
    assert "so it was left out" in " ".join(text.split())


def test_what_goes_wrong_inside_it_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise ValueError("first\nsecond")

    monkeypatch.setattr("recompute_scan.hta_bridge.break_down", fail)
    (said,) = [one for one in analyse([TRACE], hta=True).warnings if "Holistic" in one]
    assert said == (
        "Holistic Trace Analysis was left out because it failed: ValueError('first\\nsecond')"
    )


def test_who_asks_for_its_trace_is_told_what_to_install() -> None:
    with pytest.raises(UsageError, match="E212"):
        rs.analyze(TRACE).to_hta()
