import json
import re

import pytest

from recompute_scan.api import cost_figure, label, regions_figure, timeline_figure
from tests.report.sample_results import HOSTILE, clean, doubled, full, hostile, inconclusive, many

FIGURES = [timeline_figure, cost_figure, regions_figure]


def test_labels_hold_no_markup_and_no_latex() -> None:
    assert label("<b>x</b> $y$ &lt;") == "&lt;b&gt;x&lt;/b&gt; &#36;y&#36; &amp;lt;"


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("figure", FIGURES)
def test_hostile_names_are_plain_labels(name: str, figure: object) -> None:
    drawn = json.dumps(json.loads(figure(hostile(name)).to_json())["data"])  # type: ignore[operator]
    title = figure(hostile(name)).layout.title.text  # type: ignore[operator]
    ours = re.sub(r"<br>|<extra>(%\{y\})?</extra>", "", drawn)
    assert "<" not in ours + title
    assert "$" not in ours + title
    assert "\\u202e" not in drawn.replace("\\\\u202e", "")


@pytest.mark.parametrize("figure", FIGURES)
def test_nothing_to_draw_is_said(figure: object) -> None:
    title = figure(inconclusive()).layout.title.text  # type: ignore[operator]
    assert title.startswith(("No block", "The parts of a step"))


def test_timeline_lanes_start_together() -> None:
    drawn = timeline_figure(doubled())
    assert len(drawn.data) == 6
    assert drawn.layout.title.text == (
        "model.layers.3: one forward pass and 2 recomputes of it in step 2"
    )
    gemm = drawn.data[0]
    assert gemm.name == "matmul"
    starts: dict[str, float] = {}
    for lane, at in zip(gemm.y, gemm.base, strict=True):
        starts.setdefault(lane, at)
    assert len(starts) == 4
    first = list(starts.values())
    assert first[0] == pytest.approx(first[1]) == pytest.approx(first[2])


def test_cost_bars_add_up_to_the_step() -> None:
    drawn = cost_figure(doubled())
    now = [trace.x[list(trace.y).index("now")] for trace in drawn.data]
    after = [trace.x[list(trace.y).index("after the fix")] for trace in drawn.data]
    assert sum(now) == pytest.approx(295.9, abs=0.1)
    assert sum(after) == pytest.approx(247.7, abs=0.1)
    assert "16.3 % less time, 19.5 % more throughput" in drawn.layout.title.text
    assert list(cost_figure(full()).data[0].y) == ["now"]


def test_regions_show_the_redundant_apart() -> None:
    needed, redundant = regions_figure(many(200)).data
    assert list(needed.y) == [1.0] * 200
    assert list(redundant.y) == [1.0] * 199 + [0.0]
    assert list(regions_figure(clean()).data[0].y) == [0.0] * 8
