"""Many blocks, many steps, many ranks: said in few rows, and said that they were put together."""

import pytest
from msgspec import structs

from recompute_scan.report.figures import MOST_BOXES
from recompute_scan.report.render import render_html, step_bars
from recompute_scan.report.sections.layers import MOST_COLUMNS, MOST_KINDS, MOST_ROWS, by_step
from recompute_scan.report.sections.run import rank_groups
from recompute_scan.report.summary import ranks_sentence
from recompute_scan.result import Result
from recompute_scan.result.compare import compare
from tests.report.page_reader import Page
from tests.report.pages import RESULTS, large, page, ranks, traced
from tests.report.sample_results import doubled, full, inconclusive


def with_recomputes(result: Result, *rows: tuple[float | None, ...]) -> Result:
    """The result with as many blocks as rows, one number for each of its steps."""
    regions = tuple(
        structs.replace(region, recomputes_by_step=row)
        for region, row in zip(result.regions, rows, strict=False)
    )
    return structs.replace(result, regions=regions)


def test_steps_that_agree_take_one_sentence() -> None:
    found = by_step(traced("doubled_llama_fsdp"))
    assert found is not None
    assert found.sentence == (
        "In each of the 2 whole steps every block ran again the same number of times."
    )
    assert not found.rows


def test_blocks_and_steps_that_are_alike_share_rows_and_columns() -> None:
    # The last of the five steps is not whole.
    found = by_step(
        with_recomputes(
            doubled(),
            (2.0, 2.0, 0.0, 2.0, 9.0),
            (1.0, 1.0, None, 1.0, 9.0),
            (2.0, 2.0, 0.0, 2.0, 9.0),
        )
    )
    assert found is not None
    assert found.columns == ("0-1, 3", "2")
    assert found.rows == (
        ("model.layers.[0, 2]", (2.0, 0.0)),
        ("model.layers.1", (1.0, None)),
    )


def test_older_results_have_no_numbers_of_single_steps() -> None:
    assert by_step(doubled()) is None
    assert by_step(inconclusive()) is None


def test_two_hundred_layers_in_a_hundred_steps_are_a_table_of_two_by_two() -> None:
    found = by_step(large())
    assert found is not None
    assert found.sentence.startswith("200 blocks in 100 whole steps: the steps differ.")
    assert [label for label, _ in found.rows] == ["model.layers.0-198", "model.layers.199"]
    assert [values for _, values in found.rows] == [(2.0, 0.0), (1.0, 0.0)]


def test_a_strip_that_has_no_pattern_is_cut_and_says_so() -> None:
    wild = large()
    regions = tuple(
        structs.replace(
            region,
            recomputes_by_step=tuple(
                float(region.ordinal if step == 99 else (region.ordinal * 7 + step * step) % 11)
                for step in range(100)
            ),
        )
        for region in wild.regions
    )
    found = by_step(structs.replace(wild, regions=regions))
    assert found is not None
    assert len(found.rows) == MOST_KINDS
    assert len(found.columns) <= MOST_COLUMNS
    assert "140 more rows and" in found.sentence


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
    assert len(outside) <= MOST_ROWS + 1
    said = found.one("main").text
    for sentence in (
        "139 more blocks like those above",
        "Blocks that are alike in every step share a row",
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
    assert result.reason is not None
    verdict = Page(page("inconclusive")).one("verdict").text
    assert "Why there is no clearer answer" not in verdict
    assert result.reason.rstrip(".")[1:] in verdict
    assert "Redundant recomputes" not in Page(page("inconclusive")).one("device").text


def test_two_steps_are_drawn_on_one_scale() -> None:
    before, after = step_bars(compare(doubled(), full()))
    assert [part.kind for part in before.parts] == ["other", "recompute", "redundant"]
    assert [part.kind for part in after.parts] == ["other", "recompute"]
    ends = [bar.parts[-1].x + bar.parts[-1].width for bar in (before, after)]
    assert ends[0] == pytest.approx(100, abs=0.01)
    slow, fast = doubled().cost, full().cost
    assert slow is not None
    assert fast is not None
    assert ends[1] == pytest.approx(100 * fast.step_ms / slow.step_ms, abs=0.01)
    assert step_bars(compare(inconclusive(), full())) == ()
