"""Two runs side by side: the data, its document, and its renderings."""

from __future__ import annotations

import dataclasses
import json
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

import recompute_scan as rs
from recompute_scan.cli import main
from recompute_scan.comparison import SCHEMA, Comparison, compare, json_schema, to_json
from recompute_scan.report.compare_html import render_comparison_html
from recompute_scan.report.compare_text import render_comparison_text
from recompute_scan.report.page import WIDTH, columns
from recompute_scan.result import Result
from tests.report.page_reader import Page
from tests.report.sample_results import HOSTILE, clean, doubled, full, hostile, inconclusive

TRACES = Path(__file__).parents[1] / "traces"
Output = pytest.CaptureFixture[str]


def with_step(result: Result, step_ms: float) -> Result:
    assert result.cost is not None
    return dataclasses.replace(result, cost=dataclasses.replace(result.cost, step_ms=step_ms))


def flat(comparison: Comparison) -> str:
    return " ".join(render_comparison_text(comparison).split())


def test_a_change_is_said_in_two_ways_that_are_never_mixed() -> None:
    """The reported case, in both directions."""
    slow, fast = with_step(doubled(), 248.88), with_step(full(), 185.07)
    better, worse = compare(slow, fast), compare(fast, slow)
    assert better.time_change_pct == pytest.approx(-25.64, abs=0.01)
    assert better.throughput_change_pct == pytest.approx(34.48, abs=0.01)
    assert "25.6 % less time than before. Put as throughput, it is 34.5 % more." in flat(better)
    assert "34.5 % more time than before. Put as throughput, it is 25.6 % less." in flat(worse)


def test_what_went_away_and_what_is_new() -> None:
    fixed = compare(doubled(), full())
    assert [mark.code for mark in fixed.findings_gone] == ["RS001"]
    (gone,), (kept,) = fixed.checkpoints_gone, fixed.checkpoints_kept
    assert (gone.variant, gone.call_site, gone.blocks_before, gone.blocks_after) == (
        *("reentrant", "train.py:24"),
        *(8, 0),
    )
    assert (kept.mechanism, kept.blocks_before, kept.blocks_after) == ("fsdp-wrapper", 8, 8)
    back = compare(full(), doubled())
    assert (back.findings_new, back.checkpoints_new) == (
        fixed.findings_gone,
        (dataclasses.replace(gone, blocks_before=0, blocks_after=8),),
    )
    same = compare(doubled(), doubled())
    assert [mark.code for mark in same.findings_kept] == ["RS001"]
    assert not (same.findings_gone or same.findings_new or same.calls or same.warnings)
    assert not (same.checkpoints_gone or same.checkpoints_new)
    assert "as long as before" in flat(same)


def test_what_is_not_known_is_null() -> None:
    comparison = compare(doubled(), inconclusive())
    written = json.loads(to_json(comparison))
    jsonschema.validate(written, json_schema())
    assert (written["time_change_pct"], written["after"]["step_ms"]) == (None, None)
    assert "cannot be compared" in flat(comparison)


def test_times_of_different_kinds_are_warned_of() -> None:
    assert full().cost is not None
    traced = dataclasses.replace(full().cost, step_source="trace")  # type: ignore[type-var]
    comparison = compare(doubled(), dataclasses.replace(full(), cost=traced))
    assert any("cannot be compared" in warning for warning in comparison.warnings)


def test_the_shipped_schema_is_the_generated_one() -> None:
    shipped = files("recompute_scan").joinpath("comparison.schema.json").read_text("utf-8")
    assert json.loads(shipped) == json.loads(json.dumps(json_schema()))
    jsonschema.Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_harmless(name: str) -> None:
    comparison = compare(hostile(name), clean(), (name, name))
    page = Page(render_comparison_html(comparison))
    assert not page.stray
    assert not page.unclosed
    plain = Page(render_comparison_html(compare(hostile("a"), clean(), ("a", "a"))))
    assert {item.tag for item in page.elements} == {item.tag for item in plain.elements}
    for line in render_comparison_text(comparison).split("\n"):
        assert columns(line) <= WIDTH
        assert line.isprintable()


def test_the_command(tmp_path: Path, capsys: Output) -> None:
    """Real recordings: the doubled example and its repaired twin."""
    names = [str(TRACES / f"{name}_llama_fsdp") for name in ("doubled", "repaired")]
    page = tmp_path / "compared.html"
    assert main(["compare", *names, "--format", "json", "--html", str(page)]) == 0
    written = json.loads(capsys.readouterr().out)
    jsonschema.validate(written, json_schema())
    assert written["schema"] == SCHEMA
    assert [written[side]["verdict"] for side in ("before", "after")] == ["doubled", "full"]
    assert [mark["code"] for mark in written["findings_gone"]] == ["RS001"]
    (kept,), (gone,) = written["checkpoints_kept"], written["checkpoints_gone"]
    assert (kept["mechanism"], gone["variant"]) == ("fsdp-wrapper", "reentrant")
    # Each of 4 layers calls attention once, and again once for each replay.
    (attention,) = (calls for calls in written["calls"] if "attention" in calls["family"])
    assert [attention[f"recomputed_{side}"] for side in ("before", "after")] == [8, 4]
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")

    assert main(["compare", *names]) == 0
    printed = capsys.readouterr().out
    assert "RS001" in printed.partition("Went away")[2].partition("New")[0]
    assert all(columns(line) <= WIDTH for line in printed.splitlines())


def test_results_are_taken_as_they_stand(tmp_path: Path) -> None:
    """A run's folder gives what `run` wrote there; so does the file; so does a scan."""
    scan = rs.analyze(TRACES / "repaired_llama_fsdp")
    (tmp_path / "result.json").write_text(scan.to_json())
    by_folder = rs.compare(tmp_path, tmp_path / "result.json")
    assert by_folder.before.verdict == by_folder.after.verdict == "full"
    assert by_folder.time_change_pct == 0
    assert rs.compare(scan, scan).before == dataclasses.replace(by_folder.before, name="before")


def test_a_path_that_is_not_there(capsys: Output) -> None:
    assert main(["compare", "missing", "missing"]) == 3
    assert "E301" in capsys.readouterr().err
