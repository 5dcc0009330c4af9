"""Many blocks, many steps, many ranks: said in few rows, and said that they were put together."""

import pytest
from msgspec import structs

from recompute_scan.report.figures import MOST_BOXES
from recompute_scan.report.render import render_html, step_bars
from recompute_scan.report.sections.layers import MOST_ROWS
from recompute_scan.report.sections.run import rank_groups
from recompute_scan.report.summary import ranks_sentence
from recompute_scan.result import Result
from recompute_scan.result.compare import compare
from tests.present import present
from tests.report.page_reader import Page
from tests.report.pages import RESULTS, page, ranks, traced
from tests.report.sample_results import doubled, full, inconclusive


def test_ranks_that_are_alike_share_a_row() -> None:
    doubled_ranks, repaired = rank_groups(ranks(512))
    assert (doubled_ranks.verdict, doubled_ranks.recomputes) == ("doubled", 2.0)
    assert len(doubled_ranks.ranks) == len(repaired.ranks) == 256
    assert doubled_ranks.numbers == "0-3, 8-11, 16-19, …, 504-507"
    assert doubled_ranks.step == "286.7 ms (281.0 ms to 292.3 ms)"


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (traced("doubled_llama_fsdp"), None),
        (doubled(), "2 ranks, all doubled. The numbers of this page are from rank 0."),
        (
            ranks(8),
            "8 ranks that differ: 4 doubled, 4 full. The numbers of this page are from rank 0, "
            "the first with the worst verdict.",
        ),
    ],
)
def test_the_first_screen_says_whose_numbers_it_shows(result: Result, sentence: str | None) -> None:
    assert ranks_sentence(result) == sentence
    if sentence is not None:
        assert sentence in Page(render_html(result)).one("verdict").text


def test_a_large_job_stays_within_the_limits_and_says_what_it_put_together() -> None:
    text = page("large")
    assert len(text.encode()) < 8_000_000
    found = Page(text)
    assert len([item for item in found.all("rect") if "op" in item.classes]) <= 4 * MOST_BOXES
    rows = [item for item in found.all("tr") if (item.attributes.get("id") or "")[:7] == "region-"]
    outside = [row for row in rows if all(up.tag != "details" for up in row.above)]
    assert len(rows) == 200
    assert len(outside) == MOST_ROWS
    said = found.one("main").text
    for sentence in (
        "140 more blocks",
        "Ranks with the same verdict and the same number of recomputes share a row above.",
        "Every rank by itself (512)",
    ):
        assert sentence in said


def test_the_page_of_the_demo_is_light() -> None:
    assert len(page("doubled").encode()) < 2_500_000


def test_code_in_a_sentence_is_set_as_code() -> None:
    result = structs.replace(
        doubled(), warnings=("Call `step(<b>)` or --peak-tflops 9; a--b is none",)
    )
    found = Page(render_html(result))
    (item,) = (item for item in found.all("li") if item.text.startswith("Call step"))
    assert item.text == "Call step(<b>) or --peak-tflops 9; a--b is none"
    assert [child.text for child in item.children] == ["step(<b>)", "--peak-tflops"]


def test_what_the_headline_says_is_not_said_again() -> None:
    result = RESULTS["inconclusive"]()
    verdict = Page(page("inconclusive")).one("verdict").text
    assert "Why there is no clearer answer" not in verdict
    assert present(result.reason).rstrip(".")[1:] in verdict
    assert "Redundant recomputes" not in Page(page("inconclusive")).one("device").text


def test_two_steps_are_drawn_on_one_scale() -> None:
    before, after = step_bars(compare(doubled(), full()))
    assert [part.kind for part in before.parts] == ["other", "recompute", "redundant"]
    assert [part.kind for part in after.parts] == ["other", "recompute"]
    ends = [bar.parts[-1].x + bar.parts[-1].width for bar in (before, after)]
    assert ends[0] == pytest.approx(100, abs=0.01)
    slow, fast = present(doubled().cost), present(full().cost)
    assert ends[1] == pytest.approx(100 * fast.step_ms / slow.step_ms, abs=0.01)
    assert step_bars(compare(inconclusive(), full())) == ()
