"""The Python interface: the same answers as the command line, as values and tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import recompute_scan as rs
from recompute_scan.errors import InputError
from recompute_scan.result import to_json
from tests.recompute.training import checkpointed_step, marked_step, plain_step
from tests.trace_builder import Call, as_bytes, document, op, step, thread


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.json", marked_step(0, replays=2))


def write(file: Path, *calls: Call) -> Path:
    file.write_bytes(as_bytes(document(thread(*calls))))
    return file


def test_a_path_text_or_several_are_taken(trace: Path) -> None:
    one = rs.analyze(trace).result
    assert rs.analyze(str(trace)).result == rs.analyze([trace]).result == one
    assert rs.analyze(trace.parent).result == one
    assert len(rs.analyze([trace, str(trace)]).result.ranks) == 2


def test_the_answers_are_those_of_the_document(trace: Path) -> None:
    scan = rs.analyze(trace)
    written = json.loads(scan.to_json())
    assert (scan.verdict, scan.recompute_per_backward) == ("doubled", 2.0)
    assert (written["verdict"], written["headline"]) == (scan.verdict, scan.headline)
    assert [finding.code for finding in scan.findings] == ["RS001"]
    assert scan.cost is not None
    assert written["cost"]["saving_pct"] == scan.cost.saving_pct > 0
    assert scan.to_json() == to_json(scan.result)


def test_regions_are_a_table(trace: Path) -> None:
    regions = rs.analyze(trace).regions
    assert regions.index.name == "ordinal"
    assert regions["module"].tolist() == ["layers.0", "layers.1", "layers.2"]
    assert regions["recompute_runs_per_backward"].tolist() == [2.0, 2.0, 2.0]
    assert set(regions["checkpoints"]) == {
        "fsdp-wrapper non-reentrant > hf-gradient-checkpointing reentrant"
    }


def test_families_are_a_table(tmp_path: Path) -> None:
    families = rs.analyze(write(tmp_path / "t.json", checkpointed_step(0))).families
    assert families.loc["gemm", "forward_per_step"] == 6
    assert families.loc["gemm", "recomputed_per_step"] == 6
    assert families.loc["gemm", "backward_per_step"] == 6
    assert families.loc["norm", "forward_per_step"] == 3


def test_tables_without_rows(tmp_path: Path) -> None:
    scan = rs.analyze(write(tmp_path / "t.json", step(0, op("aten::mm"))))
    assert (scan.verdict, scan.recompute_per_backward, scan.cost) == ("inconclusive", None, None)
    assert len(scan.regions) == len(scan.families) == 0
    assert scan.findings == ()


def test_renderings(trace: Path) -> None:
    scan = rs.analyze(trace)
    assert scan.to_html().startswith("<!doctype html>")
    assert "doubled" in scan.to_markdown()
    assert "doubled" in str(scan)
    assert "\x1b" not in str(scan)
    assert scan._repr_html_().startswith("<p><b>doubled</b>: ")


def test_figures(trace: Path) -> None:
    scan = rs.analyze(trace)
    assert len(scan.timeline().data) > 0
    assert len(scan.cost_figure().data) > 0


def test_a_result_is_read_back(trace: Path, tmp_path: Path) -> None:
    scan = rs.analyze(trace)
    file = tmp_path / "result.json"
    file.write_text(scan.to_json())
    assert rs.load_result(file) == rs.load_result(str(file)) == scan


def test_errors_are_raised(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        rs.analyze(tmp_path / "missing.json")
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(InputError):
        rs.load_result(tmp_path / "result.json")
    with pytest.raises(OSError, match="missing"):
        rs.load_result(tmp_path / "missing.json")


def test_hostile_text_is_escaped_in_a_notebook(tmp_path: Path) -> None:
    import dataclasses  # noqa: PLC0415

    scan = rs.analyze(write(tmp_path / "t.json", plain_step(0)))
    hostile = dataclasses.replace(scan.result, headline="<img src=x onerror=alert(1)>\u202e")
    shown = rs.Scan(hostile)._repr_html_()
    assert "<img" not in shown
    assert "\u202e" not in shown


def test_importing_the_package_loads_next_to_nothing() -> None:
    code = "import sys, recompute_scan; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "numpy", "pandas", "plotly", "msgspec", "click", "jinja2"}
    assert not heavy & set(done.stdout.split())


def test_the_package_names_what_it_offers() -> None:
    for name in rs.__all__:
        assert getattr(rs, name) is not None
    with pytest.raises(AttributeError):
        rs.no_such_thing  # noqa: B018


def test_step_outside_a_recording_does_nothing() -> None:
    rs.step()
    assert rs.__version__
