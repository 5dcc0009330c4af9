import json
import re
from collections.abc import Callable

import pytest

from recompute_scan.report.render import render_markdown
from recompute_scan.report.templating import (
    markdown_code,
    markdown_fence,
    markdown_prose,
    script_json,
    visible,
)
from recompute_scan.result import Result
from recompute_scan.terminal import inert
from tests.report.sample_results import (
    HOSTILE,
    clean,
    doubled,
    full,
    hostile,
    inconclusive,
    partial,
)


def _outside_code(text: str) -> str:
    """Markdown without its fences and code spans, by CommonMark's matching of backtick runs."""
    kept, fence = [], ""
    for line in text.split("\n"):
        opening = re.match(r"(`{3,})(?!.*`)", line)
        if fence:
            fence = "" if line.startswith(fence) and not line.strip("`") else fence
        elif opening:
            fence = opening[1]
        else:
            kept.append(line)
    assert not fence, "a fence stays open"
    without_escapes = re.sub(r"\\[\\`*_\[\]|~$<>#+.)=-]", "", "\n".join(kept))
    return re.sub(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", "", without_escapes)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_do_nothing_in_a_tracker(name: str) -> None:
    text = render_markdown(hostile(name))
    outside = _outside_code(text)
    assert "`" not in outside
    assert not re.search(r"@\w|#\d|GH-\d|://|www\.", outside)
    left = outside.replace("<details><summary>Environment</summary>", "").replace("</details>", "")
    assert "<" not in left
    assert not re.search(r"\]\(|!\[", left)
    assert not re.search(r"[^\n\t\x20-\x7e\xa0-\uffff]", text)
    headings = [line for line in outside.split("\n") if line.startswith("#")]
    plain = _outside_code(render_markdown(hostile("plain"))).split("\n")
    assert len(headings) == sum(line.startswith("#") for line in plain)


@pytest.mark.parametrize("case", [doubled, full, clean, partial, inconclusive])
def test_each_verdict_reads_well(case: Callable[[], Result]) -> None:
    text = render_markdown(case())
    assert text.startswith(f"### Verdict: {case().verdict}")
    assert case().headline in text
    assert text.endswith("\n")
    assert "\n\n\n" not in text
    assert "None" not in text


def test_doubled_is_compact_and_complete() -> None:
    text = render_markdown(doubled())
    assert len(text) < 4000
    assert text.index("`train.py:31`") < text.index("`train.py:24`")
    assert "```diff\n--- a/train.py\n" in text
    assert '-model.gradient_checkpointing_enable({"use_reentrant": True})\n' in text
    assert "16.3 % less time, 19.5 % more throughput" in text


def test_a_fence_is_longer_than_anything_inside() -> None:
    assert markdown_fence("a\n````\nb", "diff") == "`````diff\na\n````\nb\n`````"
    assert markdown_fence("plain") == "```\nplain\n```"


def test_code_spans_hold_backticks() -> None:
    assert markdown_code("a``b`c") == "```a``b`c```"
    assert markdown_code("`x`") == "`` `x` ``"
    assert "|" not in markdown_code("a|b")


def test_prose_cannot_start_a_block() -> None:
    for start in ("# x", "- x", "> x", "1. x", "+ x", "    code", "=== x"):
        assert not re.match(r"#|- |>|\d+\.|\+ |    |=", markdown_prose(start)), start


@pytest.mark.parametrize("name", HOSTILE)
def test_visible_is_one_short_line(name: str) -> None:
    shown = visible(name)
    assert len(shown) <= 120
    assert shown.isprintable()


def test_unseen_characters_are_spelled_out() -> None:
    assert visible("a\x1b[2J\u202eb\u200b\n\x9b\U000e0041\ud800") == (
        "a\\x1b[2J\\u202eb\\u200b\\n\\x9b\\U000e0041\\ud800"
    )
    assert visible("模型.layers.0 é") == "模型.layers.0 é"
    assert visible("x" * 500, 11) == "xxxxx…xxxxx"
    assert visible("start" + "y" * 9999 + "end").startswith("start")
    assert visible("start" + "y" * 9999 + "end").endswith("end")
    assert inert("a\tb\n\x00", keep="\n\t") == "a\tb\n\\x00"


def test_json_for_a_page_means_the_same() -> None:
    value = {"a": "</script><!-- & \u2028 \u202e \U000e0041 é \x7f", "b": [1, None]}
    quoted = script_json(json.dumps(value, ensure_ascii=False))
    assert json.loads(quoted) == value
    assert not set("<>&\u2028\u202e\x7f\U000e0041") & set(quoted)


def test_the_picture_has_the_parts_of_a_step() -> None:
    result = doubled()
    assert result.cost is not None
    fenced = re.compile(r"```mermaid\npie title [^\n:;#]+\n(.*?)\n```", re.S)
    (picture,) = fenced.findall(render_markdown(result))
    form = re.compile(r' {4}"([^",]+), [^"]+" : (\d+\.\d\d)')
    slices = [form.fullmatch(line) for line in picture.split("\n")]
    drawn = {one[1]: float(one[2]) for one in slices if one}
    assert len(drawn) == len(slices)
    parts = result.cost.breakdown
    ratio = drawn["Redundant recomputes"] / drawn["Backward pass"]
    assert ratio == pytest.approx(parts.redundant / parts.backward, abs=0.01)


def test_without_a_cost_there_is_no_picture() -> None:
    assert "mermaid" not in render_markdown(inconclusive())
