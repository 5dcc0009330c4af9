"""The Python interface: the same answers as the command line, as values and tables."""

import ast
import base64
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
from msgspec.structs import replace

import recompute_scan as rs
from recompute_scan.api import EVENTS, FAMILIES, MEMORY, REGIONS, WORK
from recompute_scan.errors import InputError
from recompute_scan.record.recording import record
from recompute_scan.report.figures import FAMILY_FILLS, PART_FILLS
from recompute_scan.result import Result, to_json
from recompute_scan.result.watched_step import Kept, WatchedStep, Work
from tests.recompute.training import checkpointed_step, marked_step
from tests.report.page_reader import Page
from tests.report.sample_results import HOSTILE, doubled, full, hostile, inconclusive
from tests.trace_builder import as_bytes, document, launch, op, step, thread, write

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.json", marked_step(0, recomputes=2))


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


def test_what_a_step_could_do_without_is_a_table(tmp_path: Path) -> None:
    scan = rs.analyze(write(tmp_path / "t.json", checkpointed_step(0)))
    assert len(scan.work) == len(scan.memory) == 0
    work = Work("repeated", 41, 28.6, 0.19, "train.py:7", same_as="train.py:9", needs="detach")
    kept = Kept("between", 6 << 20, 12, "model.py:30", "Layer", 4)
    watched = WatchedStep(operators=200, ms=150.0, work=(work,), kept=(kept,))
    scan = rs.Scan(replace(scan.result, watched=watched))
    assert scan.work.loc[0, ["line", "operators", "needs"]].tolist() == ["train.py:7", 41, "detach"]
    assert scan.memory.loc[0, ["line", "bytes", "tensors"]].tolist() == ["model.py:30", 6 << 20, 12]


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


def test_figures(trace: Path) -> None:
    scan = rs.analyze(trace)
    figures = [name for name in dir(scan) if name.endswith("_figure")]
    assert figures == ["cost_figure", "regions_figure", "timeline_figure"]
    for name in figures:
        assert len(getattr(scan, name)().data) > 0, name


def test_a_result_is_read_back(trace: Path, tmp_path: Path) -> None:
    scan = rs.analyze(trace)
    file = tmp_path / "result.json"
    file.write_text(scan.to_json())
    assert rs.load_result(file) == rs.load_result(str(file)) == scan


def test_errors_are_raised(tmp_path: Path) -> None:
    for named in ([tmp_path / "missing.json"], []):
        with pytest.raises(InputError):
            rs.analyze(named)
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(InputError):
        rs.load_result(tmp_path / "result.json")
    with pytest.raises(OSError, match="missing"):
        rs.load_result(tmp_path / "missing.json")


def test_callbacks_take_what_record_takes() -> None:
    """Read from the source: the frameworks that they are for take long to import."""
    wanted = inspect.signature(record).parameters
    source = files("recompute_scan.integrations").joinpath("follower.py").read_text("utf-8")
    begins = [
        one
        for one in ast.walk(ast.parse(source))
        if isinstance(one, ast.FunctionDef) and one.name == "__init__"
    ]
    assert len(begins) == 1  # their common base
    for begun in begins:
        taken = {
            one.arg: (ast.unparse(one.annotation), ast.unparse(default))
            for one, default in zip(begun.args.kwonlyargs, begun.args.kw_defaults, strict=True)
            if one.annotation and default
        }
        assert taken.pop("trackers") == ("bool", "True")
        assert begun.args.kwarg is None
        assert taken == {
            one.name: (ast.unparse(ast.parse(str(one.annotation))), repr(one.default))
            for one in wanted.values()
        }


@pytest.mark.parametrize("case", [doubled, full, inconclusive])
def test_a_notebook_shows_text_and_tables(case: Callable[[], Result]) -> None:
    shown = rs.Scan(case())._repr_html_()
    page = Page(shown)
    assert not page.stray
    assert not page.unclosed
    assert case().headline in page.elements[0].text
    # What `nbconvert --sanitize-html` keeps. A style may go: it only holds the columns together.
    kept = {"div", "strong", "table", "tr", "td", "ol", "ul", "li", "code", "pre"}
    assert {item.tag for item in page.elements} <= kept | {"img"}
    assert not {"class", "href", "id"} & {n for item in page.elements for n in item.attributes}
    styles = {item.attributes.get("style") for item in page.elements} - {None}
    assert styles <= {"text-align: left"}, "no color: a theme may be light or dark"
    assert len(page.all("img")) == (case() != inconclusive())
    assert len(shown) < 50_000


def drawing(shown: str) -> str:
    """The image in what a notebook shows, which is a file of its own: well-formed SVG."""
    (image,) = Page(shown).all("img")
    kind, _, data = (image.attributes["src"] or "").partition(";base64,")
    assert kind == "data:image/svg+xml"
    svg = base64.b64decode(data, validate=True).decode()
    tags = {one.tag for one in ElementTree.fromstring(svg).iter()}
    known = {"svg", "title", "desc", "defs", "pattern", "g", "rect", "line", "circle", "text"}
    assert tags <= {f"{{http://www.w3.org/2000/svg}}{name}" for name in known}
    return svg


def test_a_notebooks_drawing_has_the_redundant_lane_the_pair_of_numbers_and_the_diff() -> None:
    shown = rs.Scan(doubled())._repr_html_()
    assert "16.3 % less time, 19.5 % more throughput" in shown
    svg = drawing(shown)
    assert "Redundant recompute: 6.41 ms" in svg
    assert "With the fix: about 247.7 ms (240.5 to 257.3 ms)" in svg
    said = Page(shown).all("img")[0].attributes["alt"] or ""
    assert "Redundant recompute: 6.41 ms" in said
    assert "-model.gradient_checkpointing_enable(" in shown
    style = (files("recompute_scan.report") / "templates" / "style.css").read_text()
    for name, colour in {**PART_FILLS, **{f"f{n}": c for n, c in enumerate(FAMILY_FILLS)}}.items():
        assert f"--{name}: {colour};" in style, "the page and the drawing have the same colours"


def test_a_scan_is_one_line_where_it_is_shown_as_text() -> None:
    assert repr(rs.Scan(doubled())) == "<Scan: doubled, 2 recomputes per backward>"
    shown = repr(rs.Scan(inconclusive(), ("a.json", "b.json", "c.json")))
    assert shown == "<Scan of a.json, b.json, …: inconclusive>"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_text_in_a_notebook(name: str) -> None:
    shown = rs.Scan(hostile(name))._repr_html_()
    page = Page(shown)
    assert not page.stray
    assert not page.unclosed
    ours = Page(rs.Scan(hostile("a plain name that is long enough"))._repr_html_())
    attributes = {(item.tag, n) for item in page.elements for n in item.attributes}
    assert attributes <= {(item.tag, n) for item in ours.elements for n in item.attributes}
    assert not {"script", "a", "b"} & {item.tag for item in page.elements}
    assert len(page.all("img")) == len(ours.all("img")) == 1
    svg = drawing(shown)
    assert "\u202e" not in shown + svg


def test_events_are_those_of_the_file(tmp_path: Path) -> None:
    first = step(0, op("aten::linear", op("aten::mm"), seq=3, dims=[[2, 3], [3, 4]]))
    second = step(1, op("aten::linear", launch("mm_kernel"), seq=4))
    written = document(thread(first), thread(second, tid=9, start=500.0))
    file = tmp_path / "trace-rank0.json"
    file.write_bytes(as_bytes(written))
    trace = rs.analyze(file).trace
    events = trace.events
    assert trace.rank == 0
    expected = [event for event in written["traceEvents"] if event["ph"] == "X"]
    assert events.index.tolist() == list(range(len(expected)))
    assert events["name"].tolist() == [event["name"] for event in expected]
    starts = [round(1000 * event["ts"]) for event in expected]
    assert events["start_ns"].tolist() == starts
    assert events["duration_ns"].tolist() == [round(1000 * event["dur"]) for event in expected]
    assert events["thread"].tolist() == [str(event["tid"]) for event in expected]
    assert events["process"].tolist() == [str(event["pid"]) for event in expected]
    host = [event["cat"] != "kernel" for event in expected]
    assert events["stream"].isna().tolist() == host
    numbers = [event["args"].get("Sequence number") for event in expected]
    assert [None if pd.isna(n) else n for n in events["sequence"]] == numbers
    shaped = events[events["shapes"].notna()]
    assert shaped["name"].tolist() == ["aten::linear"]
    assert json.loads(shaped["shapes"].iloc[0]) == [[2, 3], [3, 4]]
    recorded = rs.analyze(ROOT / "traces" / "plain_twice").trace.events
    product = recorded[recorded["name"] == "aten::addmm"].iloc[0]
    shapes, types = json.loads(product["shapes"]), json.loads(product["types"])
    assert [len(shape) for shape in shapes[:3]] == [1, 2, 2]
    assert types[:3] == ["float"] * 3
    assert set(events["step"][events["name"] == "ProfilerStep#1"]) == {1}
    kernel = events[events["kind"] == "kernel"]
    launched = events[(events["kind"] == "runtime")]
    assert kernel["correlation"].tolist() == launched["correlation"].tolist()


def test_the_tables_are_as_documented(tmp_path: Path) -> None:
    full = write(tmp_path / "one.json", marked_step(0, recomputes=2))
    empty = write(tmp_path / "two.json", step(0, op("aten::mm")))
    for file in (full, empty):
        scan = rs.analyze(file)
        made = (scan.regions, scan.families, scan.work, scan.memory, scan.trace.events)
        documented = (REGIONS, FAMILIES, WORK, MEMORY, EVENTS)
        for frame, columns in zip(made, documented, strict=True):
            assert list(frame.columns) == [column.name for column in columns]
            types = [str(kind) for kind in frame.dtypes]
            assert types == [column.dtype for column in columns]


def test_a_rank_is_asked_for(tmp_path: Path) -> None:
    for rank, recomputes in ((0, 1), (3, 2)):
        write(tmp_path / f"trace-rank{rank}.json", marked_step(0, recomputes=recomputes))
    scan = rs.analyze(tmp_path)
    ranks = [rank.rank for rank in scan.result.ranks]
    assert [scan.trace_of(rank).rank for rank in ranks] == ranks
    assert scan.trace.rank == min(ranks)
    assert len(scan.trace_of(ranks[0]).events) < len(scan.trace_of(ranks[1]).events)
    with pytest.raises(InputError, match="no trace of rank 7"):
        scan.trace_of(7)
    (tmp_path / "result.json").write_text(scan.to_json())
    with pytest.raises(InputError, match="without its traces"):
        _ = rs.load_result(tmp_path / "result.json").trace


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("recompute_scan", {"pandas", "plotly", "msgspec", "click", "jinja2"}),
        (
            "recompute_scan.integrations",
            {"transformers", "lightning", "pytorch_lightning", "accelerate"},
        ),
    ],
)
def test_importing_the_package_loads_next_to_nothing(name: str, more: set[str]) -> None:
    code = f"import sys, {name}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", *more} & set(done.stdout.split())


def test_the_package_names_what_it_offers() -> None:
    assert None not in [getattr(rs, name) for name in rs.__all__]
    with pytest.raises(AttributeError):
        rs.no_such_thing  # noqa: B018
