"""What a reader's browser does with a report: nothing behind their back, and all of it usable."""

import io
import json
import unicodedata
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec import structs
from playwright.sync_api import Page
from pypdf import PdfReader

from recompute_scan.report.render import render_markdown
from recompute_scan.report.templating import proof_trace, regions_csv
from recompute_scan.result import from_json, to_json
from tests.browser.conftest import Open
from tests.report.pages import PAGES, RESULTS
from tests.report.pages import page as page_of
from tests.report.sample_results import HOSTILE, INNER, OUTER, doubled, hostile
from tests.report.sample_results import regions as blocks

Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")
# Only what is asked about leaves the browser: all that axe found takes longer to hand over than
# to find.
AXE_RUN = """async ([sections, options]) => {
    const found = await axe.run(sections || document, { resultTypes: ['violations'], ...options });
    return {
        passes: found.passes.length,
        violations: found.violations.flatMap(
            rule => rule.nodes.map(node => [rule.id, node.html, node.failureSummary])
        ),
    };
}"""
WIDTHS = (360, 768, 1280)
OPEN_ALL = "document.querySelectorAll('details').forEach(box => { box.open = true })"


def press_everything(page: Page) -> None:
    """Every button but the one that is there to open a window."""
    for button in page.locator("main button:visible:enabled, header button:visible").all():
        if button.get_attribute("data-do") != "perfetto":
            button.click()
            page.keyboard.press("Escape")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_asks_for_nothing_and_complains_of_nothing(name: str, show: Open) -> None:
    watched = show(name)
    page = watched.page
    press_everything(page)
    page.evaluate(OPEN_ALL)
    page.wait_for_timeout(50)
    assert watched.complaints == []
    assert page.evaluate("performance.getEntriesByType('resource').length") == 0


ANSWER = (".measured", "h1", ".pair", ".cure .next", ".cure .d-del", ".cure pre", ".cure .copy")
DRAWN = (".picture svg", ".picture .whisker", ".picture .l-redundant", ".picture .struck")


def ends_of(page: Page, parts: Iterable[str]) -> dict[str, float]:
    """Where each of these parts ends, in CSS pixels from the top of the page."""
    return {
        part: page.locator(part).first.evaluate("part => part.getBoundingClientRect().bottom")
        for part in parts
    }


@pytest.mark.parametrize("theme", THEMES)
def test_the_first_screen_holds_the_whole_answer(theme: Theme, show: Open) -> None:
    page = show("doubled", viewport={"width": 1366, "height": 625}, color_scheme=theme).page
    said = page.locator("#verdict .measured").inner_text()
    for part in ("examples/doubled_llama_fsdp.py", "CPU", "1 rank", "torch 2.13.0", "2026-"):
        assert part in said
    ends = ends_of(page, (*ANSWER, *DRAWN))
    assert all(0 < end <= 625 for end in ends.values()), ends
    # as wide as the window, and nothing beside its edge
    right = page.locator(".picture").evaluate("part => part.getBoundingClientRect().right")
    assert 1200 < right <= 1366


def test_a_phone_shows_the_verdict_with_the_fix(show: Open) -> None:
    page = show("doubled", viewport={"width": 360, "height": 740}).page
    ends = ends_of(page, ANSWER)
    assert all(0 < end <= 740 for end in ends.values()), ends


@pytest.mark.parametrize("name", ["full", "none", "partial"])
def test_where_nothing_is_doubled_a_next_step_comes_first(name: str, show: Open) -> None:
    page = show(name, viewport={"width": 1366, "height": 625}).page
    ends = ends_of(page, ("h1", ".cure .next", "#next", ".picture svg"))
    assert all(0 < end <= 625 for end in ends.values()), ends
    assert page.locator("#next").inner_text().startswith("recompute-scan plan ")


def test_the_first_screen_has_a_mark_for_each_rank(show: Open) -> None:
    page = show("ranks", viewport={"width": 1366, "height": 625}).page
    assert page.locator(".each-rank li").count() == 8
    assert page.locator(".each-rank .rank-doubled").count() == 4
    ends = ends_of(page, (".each-rank", ".cure pre"))
    assert all(0 < end <= 625 for end in ends.values()), ends


def test_the_line_opens_in_an_editor_where_the_page_lies_beside_the_script(
    tmp_path: Path, show: Open
) -> None:
    shown = show("doubled").page
    assert shown.locator(".editor a").count() == 0
    folder = tmp_path / "my project" / "recompute-scan-out" / "train"
    folder.mkdir(parents=True)
    (folder / "report.html").write_text(page_of("doubled"))
    shown.goto((folder / "report.html").as_uri())
    address = shown.locator(".editor a").get_attribute("href")
    place = f"{tmp_path}/my%20project/examples/doubled_llama_fsdp.py:95"
    assert address == f"vscode://file{place}"


@pytest.mark.parametrize("name", ["crashed", "hung"])
def test_a_failed_run_says_first_what_was_measured(name: str, show: Open) -> None:
    page = show(name, viewport={"width": 1280, "height": 800}).page
    said = page.locator(".measured .fact")
    assert page.locator("#crash .fact").count() == said.count() > 1
    assert "torch 2.13.0" in page.locator("#crash .measured").inner_text()


def test_a_plan_comes_first_with_its_curve_and_its_setting(show: Open) -> None:
    page = show("planned", viewport={"width": 1280, "height": 800}).page
    assert page.get_by_role("heading", level=1).inner_text().startswith("Checkpoint 2 of 4 layers")
    assert "nothing to change" not in page.locator("#verdict").inner_text()
    parts = ("h1", ".pair", ".mark-plan", ".mark-today", "table", "#plan-code")
    ends = {
        part: page.locator(f"#plan {part}").first.evaluate(
            "part => part.getBoundingClientRect().bottom"
        )
        for part in parts
    }
    assert all(0 < end <= 800 for end in ends.values()), ends


def test_an_operator_is_shown_in_every_lane(show: Open) -> None:
    page = show("doubled", has_touch=True).page
    said = page.locator("#proof .op-line span")
    box = page.locator("#proof [data-name='scaled_dot_product_attention']").first
    box.hover()
    line = said.inner_text()
    assert line.startswith("scaled_dot_product_attention: ")
    assert line.count(" ms") == page.locator("#proof .same").count() == 3
    page.locator("#proof [data-name='linear']").first.tap()
    assert said.inner_text().startswith("linear: ")
    page.get_by_role("button", name="Next operator").focus()
    page.keyboard.press("Enter")
    assert not said.inner_text().startswith("linear: ")
    assert page.locator("#proof .same").count() == 3


def test_the_first_screens_lanes_show_it_too_by_mouse_touch_and_keys(show: Open) -> None:
    page = show("doubled", has_touch=True).page
    said = page.locator(".picture .op-said")
    lanes = page.locator(".picture .lanes")
    for name, how in (("scaled_dot_product_attention", "hover"), ("linear", "tap")):
        getattr(lanes.locator(f"[data-name='{name}']").first, how)()
        line = said.inner_text()
        assert line.startswith(f"{name}: forward pass ")
        assert ", redundant recompute " in line
        assert line.count(" ms") == lanes.locator(".same").count() == 3
    assert page.locator("#proof .same").count() == 0
    lanes.focus()
    page.keyboard.press("ArrowRight")
    assert said.inner_text() != line
    page.keyboard.press("ArrowLeft")
    assert said.inner_text() == line


def test_the_way_to_every_section_stays_in_sight(show: Open) -> None:
    page = show("doubled", viewport={"width": 1280, "height": 800}).page
    page.locator("nav a[href='#findings']").click()
    top = page.locator("#findings-title").evaluate("part => part.getBoundingClientRect().top")
    bar = page.locator("header.top").evaluate("part => part.getBoundingClientRect().bottom")
    assert 0 < bar <= top


def test_the_content_policy_refuses_what_is_not_ours(show: Open) -> None:
    watched = show(doubled())
    refused = watched.page.evaluate(
        """() => new Promise(done => {
            const seen = [];
            document.addEventListener('securitypolicyviolation', event => {
                seen.push(event.effectiveDirective);
                if (seen.length === 3) done(seen.sort());
            });
            const script = document.createElement('script');
            script.textContent = 'window.ran = true';
            document.body.append(script);
            const style = document.createElement('style');
            style.textContent = 'body { color: red }';
            document.body.append(style);
            const image = document.createElement('img');
            image.src = 'https://example.invalid/x.png';
            document.body.append(image);
        })"""
    )
    assert refused == ["img-src", "script-src-elem", "style-src-elem"]
    assert watched.page.evaluate("window.ran") is None


@pytest.fixture(scope="session")
def axe() -> str:
    source = resources.files("axe_playwright_python") / "axe.min.js"
    return source.read_text(encoding="utf-8")


def test_a_long_line_can_be_scrolled_by_keys(show: Open, axe: str) -> None:
    long = structs.replace(OUTER, source=f"wrap({', '.join(['model'] * 90)})")
    regions = blocks(4, 2.0, long, INNER)
    page = show(structs.replace(doubled(), regions=regions), bypass_csp=True).page
    page.evaluate(axe)
    found: dict[str, Any] = page.evaluate(AXE_RUN, [["#who"], {}])
    assert found["passes"]
    assert found["violations"] == []


@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_violation(name: str, show: Open, axe: str) -> None:
    page = show(name, bypass_csp=True).page
    # The rest of these two is the doubled page, and below the folds are rows like those above.
    sections = ["#verdict", "#modules", "#ranks"] if name in ("ranks", "large") else None
    if name != "large":
        page.evaluate(OPEN_ALL)
    page.evaluate(axe)
    for theme in THEMES[:1] if name == "large" else THEMES:  # the slowest has no colour of its own
        page.emulate_media(color_scheme=theme)
        # A theme changes colours and nothing else: the rest was looked at with the first.
        options = {} if theme == THEMES[0] else {"runOnly": ["cat.color"]}
        found: dict[str, Any] = page.evaluate(AXE_RUN, [sections, options])
        assert found["passes"], "axe looked at nothing"
        assert (theme, found["violations"]) == (theme, [])


@pytest.mark.parametrize("name", PAGES)
def test_no_width_scrolls_sideways(name: str, show: Open) -> None:
    page = show(name).page
    page.evaluate(OPEN_ALL)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.scrollingElement.scrollWidth") <= width
        assert page.evaluate("document.scrollingElement.clientWidth") > width - 30


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_do_nothing(name: str, show: Open) -> None:
    watched = show(hostile(name), viewport={"width": 360, "height": 800})
    page = watched.page
    press_everything(page)
    page.evaluate(OPEN_ALL)
    page.mouse.move(180, 400)
    page.wait_for_timeout(50)
    assert watched.complaints == []
    assert page.locator("img, iframe, object, embed, [onload], [onerror], [onfocus]").count() == 0
    links = page.eval_on_selector_all("a", "all => all.map(link => link.getAttribute('href'))")
    assert [link for link in links if not link.startswith("#")] == []
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 360


LONG = "a_name_without_any_break_" * 6
# What a page of some report says, and what stands there instead.
UGLY = {
    "long path": ("doubled", "examples/", f"{LONG}/" * 4),
    "long module": ("doubled", "model.layers.", f"{LONG}." * 3),
    "long line": ("doubled", "_enable(", f"_enable({LONG}={LONG}, " * 6),
    "wide letters": ("doubled", "doubled_llama", "二重チェックポイントのある学習" * 5),
    "right to left": ("doubled", "doubled_llama", "تدريب_النموذج_الكبير"),
    "huge times": ("doubled", '_ms": 2', '_ms": 999992'),
    "long call": ("doubled", "gradient_checkpointing_enable", LONG),
    "many ranks": ("large", "layers.", f"{LONG}."),
    "long error": ("crashed", "CheckpointError", f"CheckpointError{LONG * 9}"),
    "long reason": ("hung", "rank 1", f"rank 1 {'and much more ' * 40}"),
    "planned": ("planned", "plain_pytorch", LONG),
    "no answer": ("inconclusive", "flash_attn", LONG),
}


@pytest.mark.parametrize("name", UGLY)
def test_ugly_pages_show_their_answer_on_both_sizes(name: str, show: Open) -> None:
    kind, before, after = UGLY[name]
    text = to_json(RESULTS[kind](), indent=0)
    assert before in text
    shown = from_json(text.replace(before, after))
    for width, height in ((1366, 625), (360, 740)):
        page = show(shown, viewport={"width": width, "height": height}).page
        page.evaluate(OPEN_ALL)
        assert page.evaluate("document.scrollingElement.scrollWidth") <= width
        page.evaluate("scrollTo(0, 0)")
        parts = [part for part in ("h1", ".cure .next") if page.locator(part).count()]
        ends = ends_of(page, parts)
        assert all(0 < end <= height for end in ends.values()), ends


@pytest.mark.parametrize("name", PAGES)
def test_without_script_the_answer_is_there(name: str, show: Open) -> None:
    page = show(name, java_script_enabled=False).page
    title = page.get_by_role("heading", level=1).inner_text()
    assert not page.locator("button:visible").count(), "a button that can do nothing"
    if name == "compare":
        assert page.locator("#figures table").is_visible()
        return
    result = RESULTS[name]()
    if result.plan is not None:
        assert title.startswith("Checkpoint 2 of 4 layers: ")
    else:
        assert title == (result.crash.headline if result.crash else result.headline)
    if result.cost is not None:
        assert page.locator("#cost").is_visible()
    if result.regions:
        assert page.locator("#modules table").first.is_visible()
    for finding in result.findings:
        if finding.fix is None:
            continue
        said = " ".join(page.locator("#findings").inner_text().split())
        assert " ".join(finding.fix.summary.split())[:60].replace("`", "") in said
        if finding.fix.diff is not None:
            taken = page.locator("#findings pre").all_text_contents()
            assert finding.fix.diff.rstrip("\n") in [text.rstrip("\n") for text in taken]


@pytest.mark.parametrize("name", PAGES)
def test_printed_paper_holds_every_section_and_what_was_opened(name: str, show: Open) -> None:
    page = show(name).page
    if name == "doubled":  # what is folded stays so
        assert len(PdfReader(io.BytesIO(page.pdf(format="A4"))).pages) <= 6
    page.evaluate(OPEN_ALL)
    headings = [
        " ".join(text.split()) for text in page.locator("main h1, main h2").all_inner_texts()
    ]
    # Of the many rows of a large job, the first and the last stand for all.
    folded = page.locator("details table td").all_text_contents()
    folded = folded[:200] + folded[-200:]
    sheets = PdfReader(io.BytesIO(page.pdf())).pages
    printed = _letters("".join(sheet.extract_text() for sheet in sheets))
    assert len(headings) > 3
    assert [text for text in headings if _letters(text) not in printed] == []
    assert folded or name == "compare"
    assert [text for text in folded if _letters(text) not in printed] == []


def _letters(text: str) -> str:
    """Text as paper holds it: without spaces, and with ligatures taken apart."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def test_the_keyboard_reaches_everything_that_can_be_done(show: Open) -> None:
    page = show(doubled()).page
    everything = "[...document.querySelectorAll('a[href], button, summary')]"
    wanted = set(
        page.evaluate(
            f"{everything}.map((one, at) => [one.checkVisibility(), at])"
            ".filter(one => one[0]).map(one => one[1])"
        )
    )
    seen = set()
    for _ in range(2 * len(wanted)):  # boxes that scroll take a turn too
        page.keyboard.press("Tab")
        index, ring = page.evaluate(
            f"""() => {{
                const on = document.activeElement;
                const style = getComputedStyle(on);
                const ring = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0;
                return [{everything}.indexOf(on), ring];
            }}"""
        )
        assert ring or index < 0, "the place of the focus cannot be seen"
        seen.add(index)
    assert [page.evaluate(f"{everything}[{index}].outerHTML") for index in wanted - seen] == []


def test_enter_opens_what_is_folded(show: Open) -> None:
    page = show(doubled()).page
    summary = page.locator("summary:visible").first
    summary.focus()
    page.keyboard.press("Enter")
    assert summary.evaluate("summary => summary.parentElement.open")


def test_the_theme_can_be_turned_and_a_link_opens_its_place(show: Open) -> None:
    page = show(doubled(), color_scheme="light").page
    background = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(background)
    page.get_by_role("button", name="Theme").click()
    assert page.evaluate(background) != before

    places = page.eval_on_selector_all("[id]", "all => all.map(place => place.id)")
    assert len(places) == len(set(places))
    for link in page.locator("a[href^='#']").all():
        assert (link.get_attribute("href") or "")[1:] in places


def test_the_page_explains_itself(show: Open) -> None:
    page = show(doubled()).page
    dialog = page.get_by_role("dialog", name="How to read this page")
    assert not dialog.is_visible()
    page.set_viewport_size({"width": 800, "height": 300})  # less than it needs
    page.keyboard.press("?")
    assert dialog.is_visible()
    assert dialog.evaluate("one => one.scrollTop") == 0  # read from its beginning
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    page.get_by_role("button", name="How to read this page").click()
    dialog.get_by_role("button", name="Close").click()
    assert not dialog.is_visible()


@pytest.mark.parametrize("name", ["plain", *HOSTILE[:3]])
def test_downloads_hold_what_the_page_was_made_of(name: str, show: Open) -> None:
    result = doubled() if name == "plain" else hostile(name)
    page = show(result, accept_downloads=True).page

    def downloaded(button: str) -> str:
        with page.expect_download() as waiting:
            page.get_by_role("button", name=button).click()
        return Path(waiting.value.path()).read_text(encoding="utf-8")

    assert from_json(downloaded("Download JSON")) == result
    assert downloaded("Download the table (CSV)") == regions_csv(result)
    if result.proof is not None:
        assert json.loads(downloaded("Download it as a trace"))["traceEvents"]


def test_the_proof_can_be_enlarged_and_then_names_its_boxes(show: Open) -> None:
    page = show("doubled", color_scheme="light").page
    names = "[...document.querySelectorAll('#proof .on-op')].map(text => text.textContent)"
    before = page.evaluate(names)
    assert "scaled_dot_product_attention" not in before
    drawing = page.locator("#proof svg.wide")
    whole_marks = page.locator("#proof .tick").count()
    width = drawing.evaluate("drawing => drawing.getBoundingClientRect().width")
    for _ in range(3):
        page.get_by_role("button", name="Enlarge").click()
    wider = drawing.evaluate("drawing => drawing.getBoundingClientRect().width")
    assert wider == pytest.approx(8 * width)
    # the scale is divided more finely, and its marks stand where they say
    marks = """[...document.querySelectorAll('#proof .tick')].map(
        mark => [parseFloat(mark.getAttribute('x')), parseFloat(mark.textContent)])"""
    places = sorted(page.evaluate(marks))
    assert len(places) > 4 * whole_marks
    assert len(places) == len({value for _, value in places})
    per_ms = places[-1][0] / places[-1][1]
    assert all(x == pytest.approx(value * per_ms, abs=0.01) for x, value in places)
    # once in the forward pass, and again in each of the two recomputes
    assert page.evaluate(names).count("scaled_dot_product_attention") == 3
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 1280
    for _ in range(4):
        page.get_by_role("button", name="Shrink").click()
    shrunk = drawing.evaluate("drawing => drawing.getBoundingClientRect().width")
    assert shrunk == pytest.approx(width)
    assert page.locator("#proof .tick").count() == whole_marks
    assert [name for name in page.evaluate(names) if name] == before


def test_markdown_is_copied(show: Open) -> None:
    page = show(doubled(), permissions=["clipboard-read", "clipboard-write"]).page
    page.get_by_role("button", name="Copy as Markdown").click()
    page.wait_for_function("document.querySelector('.said').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == render_markdown(doubled())


def test_the_excerpt_is_handed_to_perfetto(show: Open) -> None:
    page = show(doubled()).page
    # Stands in for ui.perfetto.dev, which answers PING with PONG and takes a buffer.
    page.context.route(
        "https://ui.perfetto.dev/**",
        lambda route: route.fulfill(
            content_type="text/html",
            body="""<script>
                addEventListener('message', event => {
                    if (event.data === 'PING') event.source.postMessage('PONG', '*');
                    else window.taken = new TextDecoder().decode(event.data.perfetto.buffer);
                });
            </script>""",
        ),
    )
    with page.expect_popup() as waiting:
        page.get_by_role("button", name="Open this excerpt in Perfetto").click()
    there = waiting.value
    there.wait_for_function("window.taken !== undefined")
    proof = doubled().proof
    assert proof is not None
    assert there.evaluate("window.taken") == proof_trace(proof)
