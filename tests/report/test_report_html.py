import base64
import functools
import hashlib
import json
import re
from collections.abc import Callable
from importlib.resources import files

import pytest
from msgspec import structs

from recompute_scan.diagnose.outcome import HANGS
from recompute_scan.frameworks.base import SHARDED_DOCS
from recompute_scan.frameworks.registry import MECHANISMS
from recompute_scan.report import words
from recompute_scan.report.figures import timeline
from recompute_scan.report.render import render_html
from recompute_scan.result import Result, from_json, to_json
from recompute_scan.result.fidelity import ComparedRegion, Fidelity, KeptState
from tests.present import present
from tests.report.page_reader import Page
from tests.report.sample_results import (
    HOSTILE,
    clean,
    cost,
    doubled,
    full,
    hostile,
    inconclusive,
    many,
    partial,
    proof,
    verified,
)

CASES = [doubled, verified, full, clean, partial, inconclusive, lambda: many(200)]


@functools.cache
def shown(case: Callable[[], Result]) -> Page:
    """The page of a result, rendered once for all tests that read it."""
    return Page(render_html(case()))


def plain() -> Result:
    return hostile("a plain name that is long enough")


@pytest.mark.parametrize("case", CASES)
def test_page_is_sound(case: Callable[[], Result]) -> None:
    page = shown(case)
    assert not page.stray
    assert not page.unclosed
    ids = [item.attributes["id"] for item in page.elements if "id" in item.attributes]
    assert len(ids) == len(set(ids))
    for link in page.all("a"):
        address = link.attributes["href"] or ""
        assert address.startswith("https://") or address.removeprefix("#") in ids, address
    for item in page.elements:
        for name in ("aria-labelledby", "data-copy"):
            for wanted in (item.attributes.get(name) or "").split():
                assert wanted in ids
    assert len(page.all("h1")) == 1
    assert page.all("html")[0].attributes["lang"] == "en"
    for table in page.all("table"):
        assert "scroll" in table.above[-1].classes


@pytest.mark.parametrize("case", CASES)
def test_every_picture_has_a_name_and_a_summary(case: Callable[[], Result]) -> None:
    page = shown(case)
    pictures = [item for item in page.all("svg") if all(up.tag != "svg" for up in item.above)]
    for picture in pictures:
        title, summary = picture.children[:2]
        assert (title.tag, summary.tag) == ("title", "desc")
        assert title.text
        assert len(summary.text) > 40
        named = f"{title.attributes['id']} {summary.attributes['id']}"
        assert picture.attributes["aria-labelledby"] == named
    result = case()
    planned = result.memory is not None and len(result.memory.plans) > 1
    # once on the first screen, once with its table
    drawn = (result.cost is not None) + (result.proof is not None)
    assert len(pictures) == 2 * drawn + planned


def test_same_result_gives_the_same_bytes() -> None:
    first = render_html(doubled())
    assert first == render_html(doubled())
    assert first == render_html(from_json(to_json(doubled())))


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_fetched_and_the_policy_holds(case: Callable[[], Result]) -> None:
    page = shown(case)
    fetching = {"src", "srcset", "data", "poster", "action", "formaction", "background", "style"}
    for item in page.elements:
        assert not fetching & set(item.attributes), item
        assert item.tag not in {"link", "img", "iframe", "object", "embed", "base", "form"}
        assert not any(name.startswith("on") for name in item.attributes)
        if "href" in item.attributes:
            assert item.tag == "a"
    (style,), (script,) = page.all("style"), page.all("script")
    assert "url(" not in style.text
    assert "@import" not in style.text
    policy = page.all("meta")[1].attributes["content"] or ""
    assert policy.startswith("default-src 'none'; ")
    for kind, element in (("style", style), ("script", script)):
        digest = base64.b64encode(hashlib.sha256(element.text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (doubled, "around the same block they free no further memory"),
        (full, "paid once. No recompute is redundant."),
        (clean, "No checkpoint needs a change."),
        (partial, "pass; the rest kept its results. No recompute is redundant."),
        (inconclusive, "The trace holds no backward pass."),
    ],
)
def test_each_verdict_says_what_it_means(case: Callable[[], Result], sentence: str) -> None:
    result = case()
    verdict = shown(case).one("verdict").text
    assert result.headline in verdict
    assert sentence in verdict
    assert f"Confidence: {result.confidence}." in verdict


def test_doubled_page_holds_the_whole_story() -> None:
    page = shown(doubled)
    verdict = page.one("verdict").text
    assert "A step takes 295.9 ms; with the fix it takes about 247.7 ms." in verdict
    bill = page.one("cost").text
    said = "about 247.7 ms instead of 295.9 ms: 16.3 % less time, 19.5 % more throughput."
    assert said in bill
    who = page.one("who").text
    assert who.index("train.py:31") < who.index("train.py:24")
    assert 'model.gradient_checkpointing_enable({"use_reentrant": True})' in who
    fix = page.one("finding-RS001-diff")
    assert fix.text.rstrip("\n") == doubled().findings[0].fix.diff.rstrip("\n")  # type: ignore[union-attr]
    removed = [span.text for span in page.all("span") if "d-del" in span.classes]
    assert removed == 2 * ['-model.gradient_checkpointing_enable({"use_reentrant": True})\n']
    check = page.one("check").text
    folder = "recompute-scan-out/train"
    assert "recompute-scan run --verify --steps 5 examples/train.py" in check
    assert f"recompute-scan run --steps 5 -o {folder}-after examples/train.py" in check
    assert f"recompute-scan compare {folder} {folder}-after" in check
    known = Page(render_html(doubled(), folder="out/x")).one("check").text
    assert "recompute-scan fix out/x --apply" in known
    assert "-after" not in known
    assert page.one("region-7").text.count("2.0") == 1
    assert "losses" not in check


def test_without_script_only_the_buttons_are_missing() -> None:
    page = shown(doubled)
    hidden = [item for item in page.elements if "hidden" in item.attributes]
    assert hidden
    buttons = [item for item in hidden if {"copy", "tools", "take"} & set(item.classes)]
    held = [item.attributes["id"] for item in hidden if item not in buttons]
    assert set(held) == {"as-markdown", "as-csv", "as-trace"}, "what the buttons hand out"


def test_proof_lanes_share_one_scale_and_start_at_the_left() -> None:
    page = shown(doubled)
    drawn = [item for item in page.all("rect") if page.one("proof") in item.above]
    lanes = [item for item in drawn if "lane-bed" in item.classes]
    assert [lane.classes[1] for lane in lanes] == [
        "l-forward",
        "l-recompute",
        "l-redundant",
        "l-backward",
    ]
    widths = [float((lane.attributes["width"] or "").rstrip("%")) for lane in lanes]
    assert widths[0] == widths[1] == widths[2] < widths[3] == 100
    boxes = [item for item in drawn if "op" in item.classes]
    starts = [box.attributes["x"] for box in boxes]
    assert starts[:17] == starts[17:34] == starts[34:51]
    said = {
        (item.attributes.get("data-name"), item.attributes.get("data-time"))
        for item in page.all("g")
        if page.one("proof") in item.above
    }
    assert ("scaled_dot_product_attention", "1.27 ms") in said
    assert "aten::scaled_dot_product_attention" in page.one("proof").text
    assert "6.21 ms into the step" in page.one("proof").text
    assert "clock" not in page.one("proof").text


def test_a_long_backward_lane_is_cut_and_says_so() -> None:
    base = proof(2)
    lanes = (*base.lanes[:3], structs.replace(base.lanes[3], duration_us=90_000.0))
    drawn = present(timeline(structs.replace(doubled(), proof=structs.replace(base, lanes=lanes))))
    assert [lane.width for lane in drawn.lanes] == [pytest.approx(45.455)] * 3 + [100.0]
    assert drawn.lanes[3].title == "The gradients (backward): 90.0 ms, cut at the right edge"
    assert all(0 <= box.x < 100 and box.x + box.width <= 100.11 for box in drawn.lanes[3].boxes)


def test_redundant_that_does_not_matter_promises_nothing() -> None:
    slight = structs.replace(full(), cost=cost(51.0, 49.6, 0.4, 0.3))
    text = Page(render_html(slight)).one("main").text
    assert "With the fix" not in text
    assert "After the fix" not in text
    assert "stays as it is" in text


def test_unknown_is_said_and_never_zero() -> None:
    page = shown(inconclusive)
    assert not [item for item in page.all("dd") if "value" in item.classes]
    assert "cost" not in [item.attributes["id"] for item in page.all("section")]
    none_known = structs.replace(doubled(), recompute_per_backward=None, proof=None)
    assert "not known" in Page(render_html(none_known)).one("verdict").text


def test_an_unclear_trace_with_step_times_claims_nothing_about_them() -> None:
    timed = structs.replace(inconclusive(), cost=cost(51.0, 0.0, 0.0, 0.0))
    page = Page(render_html(timed))
    assert not [item for item in page.all("dd") if "value" in item.classes]
    assert "196.7 ms" in page.one("cost").text
    assert not page.all("svg")
    assert "is not known" in page.one("cost").text
    assert "0.0" not in page.one("verdict").text


def test_a_deep_model_folds_its_repeats_and_says_so() -> None:
    result = many(200)
    text = render_html(result)
    assert len(text.encode()) < 1_000_000
    page = Page(text)
    assert "140 more blocks" in page.one("modules").text
    assert all(up.tag != "details" for up in page.one("region-59").above)
    assert any(up.tag == "details" for up in page.one("region-60").above)


def test_page_carries_the_result_itself() -> None:
    for case in (doubled, inconclusive, lambda: hostile(HOSTILE[0]), lambda: hostile(HOSTILE[7])):
        text = shown(case).one("raw-json").text
        assert json.loads(text) == json.loads(to_json(case()))
        assert from_json(text) == from_json(to_json(case()))


def test_a_huge_result_is_left_to_its_own_file() -> None:
    text = render_html(many(8000))
    assert len(text.encode()) < 8_000_000
    page = Page(text)
    assert "too large to be carried" in page.one("raw").text
    assert "further ones are only in the result's JSON" in page.one("modules").text


def test_a_report_about_findings_with_one_code_keeps_their_anchors_apart() -> None:
    twice = structs.replace(doubled(), findings=doubled().findings * 2)
    page = Page(render_html(twice))
    assert page.one("finding-RS001").tag == page.one("finding-RS001-2").tag == "article"
    assert "must not be added up" in page.one("findings").text


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_text(name: str) -> None:
    text = render_html(hostile(name))
    page = Page(text)
    ours = shown(plain)
    assert not page.stray
    assert not page.unclosed

    def shapes(of: Page) -> set[tuple[str, str]]:
        found = {(item.tag, attribute) for item in of.elements for attribute in item.attributes}
        return found | {(item.tag, "") for item in of.elements}

    # an empty name leaves the module unknown, which has a wording of its own
    assert shapes(page) <= shapes(ours) | {("span", "class")}
    assert len(page.all("script")) == 1
    for link in page.all("a"):
        assert (link.attributes["href"] or "").startswith("#")
    assert not re.search(
        r"[^\n\t\x20-\x7e\xa0-\u1fff\u2010-\u2027\u2030-\u205e\u2070-\uffff]", text
    )
    assert "\u202e" not in text


def test_only_an_address_of_our_findings_becomes_a_link() -> None:
    base = doubled().findings[0]
    known = (SHARDED_DOCS, MECHANISMS[0].docs, HANGS[0].sources[0])
    for address in ("javascript:alert(1)", "https://example.org", f"{known[0]}.evil", *known):
        finding = structs.replace(base, fix=structs.replace(present(base.fix), docs=address))
        page = Page(render_html(structs.replace(doubled(), findings=(finding,))))
        links = {link.attributes["href"] or "" for link in page.all("a")}
        assert [one for one in links if one[:1] != "#"] == [address] * (address in known)
        assert address in page.one("findings").text


@pytest.mark.parametrize(
    "target", ["x.py; rm -rf ~.py", "--verify.py", "$(x).py", "a b.py", "pkg.mod"]
)
def test_a_script_name_that_a_shell_would_read_more_into_is_not_repeated(target: str) -> None:
    result = structs.replace(doubled(), environment={"target": target})
    check = Page(render_html(result)).one("check").text
    assert target not in check
    assert "recompute-scan run --steps 5 -o recompute-scan-out/train-after train.py" in check
    assert "in place of train.py" in check


def _drawn_after(result: Result) -> list[str]:
    """What the second bar of the first screen says of its parts."""
    page = Page(render_html(result))
    (drawing,) = [d for d in page.all("svg") if d.attributes.get("aria-labelledby", "") == _STEP]
    parts = [item for item in page.all("rect") if drawing in item.above and "part" in item.classes]
    after = [item for item in parts if item.attributes["y"] == "100"]
    return [item.above[-1].children[0].text for item in after]


_STEP = "step-svg-title step-svg-desc"


def test_bars_never_invent_parts_that_do_not_fit() -> None:
    # a step far below the sum of what stays cannot be split up
    saves_more = structs.replace(doubled(), cost=cost(51.0, 49.6, 49.6, 90.0))
    assert _drawn_after(saves_more) == ["Everything else: 205.9 ms, 100.0 %"]
    bill = Page(render_html(saves_more)).one("cost").text
    assert "205.9 ms" in bill
    assert "take 49.6 ms; the other 40.4 ms are what the checkpoint itself does" in bill


def test_what_the_fix_saves_beyond_the_redundant_recomputes_is_drawn_and_said() -> None:
    # more than the redundant recomputes take: all that stays is shortened alike
    result = structs.replace(doubled(), cost=cost(51.0, 49.6, 49.6, 70.0))
    after = _drawn_after(result)
    assert [text.partition(":")[0] for text in after] == [
        "Forward pass",
        "Needed recomputes",
        "Backward pass",
        "Optimizer",
        "Everything else",
    ]
    drawn = sum(float(text.partition(": ")[2].partition(" ms")[0]) for text in after)
    assert drawn == pytest.approx(present(result.cost).predicted_step_ms, abs=0.3)
    assert "the other 20.4 ms" in Page(render_html(result)).one("cost").text


def test_the_first_screen_says_what_was_measured_and_what_to_delete() -> None:
    facts = {
        **doubled().environment, "torch": "2.9.1", "world_size": "8", "recorded": "2026-11-20"
    }  # fmt: skip
    verdict = Page(render_html(structs.replace(doubled(), environment=facts))).one("verdict")
    for said in ("examples/train.py", "CPU", "8 ranks", "torch 2.9.1", "2026-11-20"):
        assert said in verdict.text
    assert '-model.gradient_checkpointing_enable({"use_reentrant": True})' in verdict.text


def _themes() -> list[dict[str, str]]:
    style = (files("recompute_scan.report") / "templates" / "style.css").read_text()
    blocks = re.findall(r":root[^{]*\{([^}]*)\}", style)
    assert len(blocks) == 3
    return [dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6})", block)) for block in blocks]


def test_both_ways_to_the_dark_theme_are_the_same() -> None:
    light, preferred, chosen = _themes()
    assert preferred == chosen
    assert set(light) - set(chosen) == set()


def _contrast(one: str, other: str) -> float:
    """WCAG 2.2 contrast ratio of two ``#rrggbb`` colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


TEXTS = [
    *[(ink, ground) for ink in ("ink", "muted", "link") for ground in ("page", "panel")],
    *[(kind, f"{kind}-bg") for kind in ("bad", "good", "warn", "add", "del")],
    *[("ink", "bad-bg"), ("bad", "page"), ("good", "page"), ("warn", "page"), ("muted", "panel")],
    *[("on-part", part) for part in words.PART_WORDS],
    *[("on-part", f"f{number}") for number in range(6)],
]
SHAPES = [
    *[(f"{part}-line", "page") for part in words.PART_WORDS],
    *[(f"f{number}-line", "page") for number in range(6)],
    *[(name, "page") for name in ("focus", "bad-line", "good-line", "warn-line", "plain-line")],
]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_contrast_is_enough(theme: int) -> None:
    colours = _themes()[theme]
    for one, other in TEXTS:
        assert _contrast(colours[one], colours[other]) >= 4.5, (one, other)
    for one, other in SHAPES:
        assert _contrast(colours[one], colours[other]) >= 3, (one, other)


def test_the_device_section_draws_every_plan() -> None:
    page = render_html(doubled())
    section = page[page.index('<section id="device"') :]
    section = section[: section.index("</section>")]
    assert section.count("<circle") == 3
    assert section.count('r="7"') == 1
    assert "HFU is 1.61 times MFU" in section
    assert "flash_attn::_flash_attn_varlen_forward" in section
    assert "41.0 GiB were allocated" in section


def test_attributes_that_a_recompute_sets_again_are_shown_beside_the_answer() -> None:
    counted = ComparedRegion(
        module="layers.0",
        module_class="Layer",
        variant="non-reentrant",
        mechanism="",
        site="",
        calls=1,
        recomputes=1,
        operators=9,
        states=(KeptState("layers.0.calls", False, "3", "4", "5"),),
    )
    text = render_html(structs.replace(doubled(), fidelity=Fidelity((counted,))))
    assert "the same; changes layers.0.calls again: 3, then 4, then 5" in text
    assert "Yes, to the last bit: 9 results of 1 block were compared." in text
