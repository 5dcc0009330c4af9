"""A section is a module and its template; every rendering walks the list and knows none of them."""

import re
import shutil
import textwrap
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import pytest

from recompute_scan.report.render import SECTIONS, sections_of
from recompute_scan.result import from_json
from tests.record.runs import run_plain
from tests.report.page_reader import Page
from tests.report.pages import RECORDED, RESULTS, page
from tests.report.sample_results import doubled
from tests.scratch import copy_package

ROOT = Path(__file__).parents[2]
REPORT = files("recompute_scan.report")
RENDER = """\
import sys
from importlib import import_module
from pathlib import Path
from recompute_scan.report.render import render_html
from recompute_scan.report.render import render_markdown, render_text
from recompute_scan.result import from_json

result = from_json(Path(sys.argv[1]).read_bytes())
Path("page.html").write_text(render_html(result), encoding="utf-8")
Path("text.txt").write_text(render_text(result, color=False), encoding="utf-8")
Path("markdown.md").write_text(render_markdown(result), encoding="utf-8")
print(sys.modules["recompute_scan"].__file__)
"""


def _recipe() -> dict[str, str]:
    """The files that the recipe in the documentation has one write, by their path."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^## A report section\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    steps = re.findall(
        r"^\d\. `([\w/]+\.\w+)`.*?```\w+\n(.*?)```", recipe, re.DOTALL | re.MULTILINE
    )
    return {name: textwrap.dedent(body) for name, body in steps}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package in which the recipe was followed, word by word."""
    root = tmp_path_factory.mktemp("scratch")
    package = copy_package(root)
    shutil.copytree(RECORDED, root / "tests" / "report" / "recorded")
    for name, body in _recipe().items():
        assert not (root / name).exists(), f"the recipe writes over {name}"
        (root / name).write_text(body, encoding="utf-8")
    listed = package / "report" / "render.py"
    text = listed.read_text(encoding="utf-8")
    text = text.replace("layers, plan, run\n", "layers, plan, recorded_steps, run\n")
    text = text.replace(
        "\n    run.RANK_BY_RANK,\n", "\n    recorded_steps.SECTION,\n    run.RANK_BY_RANK,\n"
    )
    listed.write_text(text, encoding="utf-8")
    return root


def _run(scratch: Path, *arguments: str) -> str:
    done = run_plain(scratch, *arguments, PYTHONPATH=str(scratch / "src"))
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def test_a_section_added_as_the_recipe_says_is_in_every_rendering(scratch: Path) -> None:
    assert str(scratch) in _run(scratch, "-c", RENDER, str(RECORDED / "partial.json"))
    result = from_json((RECORDED / "partial.json").read_bytes())
    whole = sum(step.complete for step in result.steps)
    sentence = f"{len(result.steps)} steps recorded, {whole} of them whole."
    shown = Page((scratch / "page.html").read_text(encoding="utf-8"))
    assert sentence in shown.one("recorded").text
    assert shown.one("recorded-title").text == "Recorded steps"
    assert ("#recorded", "Recorded") in [(a.attributes["href"], a.text) for a in shown.all("a")]
    order = [item.attributes["id"] for item in shown.all("section")]
    assert order.index("modules") + 1 == order.index("recorded") == order.index("who") - 1
    assert sentence in shown.one("as-markdown").text
    for name, title in (
        ("text.txt", "\nRecorded steps\n"),
        ("markdown.md", "#### Recorded steps\n"),
    ):
        text = (scratch / name).read_text(encoding="utf-8")
        assert title in text
        assert sentence in text


def test_the_recipes_own_test_passes(scratch: Path) -> None:
    name = "tests/report/test_recorded_steps.py"
    assert "1 passed" in _run(scratch, "-m", "pytest", "-q", "-p", "no:cacheprovider", name)


def test_a_section_has_an_anchor_of_its_own_and_a_template_beside_its_module() -> None:
    anchors = [section.anchor for section in SECTIONS]
    assert len(set(anchors)) == len(anchors)
    folder = REPORT / "sections"
    names = {Path(item.name) for item in folder.iterdir()}
    modules = [
        import_module(f"recompute_scan.report.sections.{name.stem}")
        for name in names
        if name.suffix == ".py"
    ]
    stems = {name.stem for name in names if name.suffix == ".html"}
    assert stems == {Path(section.template).stem for section in SECTIONS}
    for stem in stems:
        (section,) = [one for one in SECTIONS if one.template == f"{stem}.html"]
        assert [getattr(one, stem.upper(), None) for one in modules].count(section) == 1


def test_the_renderings_name_no_section() -> None:
    names = {Path(section.template).stem for section in SECTIONS}
    names |= {f'"#{section.anchor}"' for section in SECTIONS}
    for path in ("render.py", "templates/page.html", "templates/help.html"):
        source = (REPORT / path).read_text(encoding="utf-8")
        assert not [name for name in names if name in source], path


@pytest.mark.parametrize(
    "name", ["doubled", "inconclusive", "crashed", "hung", "verified", "ranks"]
)
def test_the_page_has_the_sections_of_its_result_in_their_order(name: str) -> None:
    result = RESULTS[name]()
    shown = Page(page(name))
    sections = sections_of(result)
    assert [item.attributes["id"] for item in shown.all("section")] == [s.anchor for s in sections]
    links = [f"#{section.anchor}" for section in sections if section.link]
    (navigation,) = shown.all("nav")
    inside = [a.attributes["href"] for a in shown.all("a") if navigation in a.above]
    assert inside == links
    for section in sections:
        if section.anchor not in ("crash", "verdict"):  # the headline is their heading
            assert shown.one(f"{section.anchor}-title").text == section.heading(result)


def test_what_a_result_has_not_is_in_no_rendering() -> None:
    assert {"crash", "measured"}.isdisjoint(section.anchor for section in sections_of(doubled()))
    failed = [section.anchor for section in sections_of(RESULTS["crashed"]())]
    assert failed == ["crash", "verdict", "findings", "rules", "health", "method"]
