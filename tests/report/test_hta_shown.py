"""The breakdowns of Holistic Trace Analysis beside ours, in every rendering."""

import pytest
from msgspec import structs

from recompute_scan.report.render import render_html, render_markdown, render_text
from recompute_scan.result import Result, from_json, to_json
from tests.report.page_reader import Page
from tests.report.sample_results import HTA, clean, doubled


def with_kinds(*kinds: str) -> Result:
    return structs.replace(
        doubled(), hta=structs.replace(HTA, kernel_types=dict.fromkeys(kinds, 50.0))
    )


def test_the_terminal_shows_both_and_whose_they_are() -> None:
    written = render_text(doubled(), color=False)
    block = written[written.index("Holistic Trace Analysis of rank 1") :].splitlines()
    head = block.index("")
    assert block[head + 1].split() == ["HTA", "recompute-scan"]
    rows = {line[2:48].strip(): line[48:].split("  ") for line in block[head + 2 : head + 9]}
    assert [part.strip() for part in rows["Idle"] if part] == ["12.5 %", "12.6 %"]
    assert [part.strip() for part in rows["Kernels: computation"] if part] == ["84.0 %"]
    # A command is one line, however long.
    assert max(len(line) for line in block if "  recompute-scan " not in line) <= 80


def test_markdown_shows_them_as_a_table() -> None:
    written = render_markdown(doubled())
    assert "#### Holistic Trace Analysis of rank 1" in written
    assert "| | HTA | recompute-scan |" in written
    assert "| Communication during computation | 38.1 % | 38.2 % |" in written


@pytest.mark.parametrize("render", [render_markdown, render_html])
def test_a_hostile_kind_is_inert(render: object) -> None:
    assert callable(render)
    written = render(with_kinds("<script>alert(1)</script>", "a|b\nc"))
    assert "<script>alert" not in written
    assert "a|b\nc" not in written
    if render is render_markdown:
        (row,) = [line for line in written.splitlines() if "Kernels: a" in line]
        assert row.replace("\\|", "").count("|") == 4


def test_a_hostile_kind_keeps_to_its_line() -> None:
    written = render_text(with_kinds("a\x1b[31m\nb" + "x" * 90), color=False)
    assert "\x1b" not in written
    assert max(map(len, written.splitlines())) <= 120


def test_one_rank_needs_no_name_and_a_result_of_before_has_no_second_column() -> None:
    alone = structs.replace(doubled(), ranks=(), hta=structs.replace(HTA, own=None))
    written = render_text(alone, color=False)
    assert "Holistic Trace Analysis\n" in written
    assert "| Idle | 12.5 % |  |" in render_markdown(alone)
    assert from_json(to_json(alone)) == alone


def test_the_page_has_a_section_of_them() -> None:
    section = Page(render_html(doubled())).one("hta").text
    assert "Holistic Trace Analysis of rank 1" in section
    assert "Beside its figures, what recompute-scan counts of the same trace." in section
    assert "84.0 %" in section


def test_without_it_nothing_is_said() -> None:
    for render in (render_markdown, render_html):
        assert "Holistic" not in render(structs.replace(clean(), hta=None))
    assert "Holistic" not in render_text(structs.replace(clean(), hta=None), color=False)
