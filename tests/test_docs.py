"""The pages that follow from the code are what the code gives."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return module_at(DOCS / "generate.py")


def module_at(path: Path) -> ModuleType:
    """A program of the documentation, as a module."""
    spec = importlib.util.spec_from_file_location(f"tests.docs_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_transcripts_are_what_is_printed(tmp_path: Path) -> None:
    transcripts = module_at(DOCS / "transcripts.py")
    page = transcripts.PAGE.read_text(encoding="utf-8")
    transcripts.prepare(tmp_path)
    for one in transcripts.TRANSCRIPTS:
        if one.recorded:
            assert f"$ {one.command}\n" in page
        else:
            shown = transcripts.section(one, tmp_path)
            assert shown in page, f"{one.command}: run python docs/transcripts.py"


def test_an_answer_has_at_most_15_lines() -> None:
    """Behind what the script printed and what was said while it ran."""
    transcripts = module_at(DOCS / "transcripts.py")
    page = transcripts.PAGE.read_text(encoding="utf-8")
    for one in transcripts.TRANSCRIPTS:
        said = page.partition(f"$ {one.command}\n")[2].partition("\n```")[0]
        beginning = re.search("^(Verdict: |Run: |Plan for |Keep what )", said, re.MULTILINE)
        answer = said[beginning.start() :] if beginning else said
        assert one.full or 0 < len(answer.splitlines()) <= transcripts.MOST_LINES, one.command


def test_the_generated_pages_are_true(generator: ModuleType) -> None:
    assert {"commands.md", "result-fields.md", "findings/RS101.md"} <= set(generator.PAGES)
    for page, write in generator.PAGES.items():
        written, now = (DOCS / page).read_text(encoding="utf-8"), write()
        if page.endswith(".html"):  # how a template is indented is no content
            written, now = " ".join(written.split()), " ".join(now.split())
        assert written == now, f"{page}: run python docs/generate.py (make fix does)"


def test_the_badges_of_the_readme_say_what_they_show(generator: ModuleType) -> None:
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"!\[(.+)\]\(docs/(img/badge-.+\.svg)\)", readme))
    svgs = {name: svg for name, svg in generator.PAGES.items() if "badge-" in name}
    titles = {name: re.search("<title>(.+)</title>", svg()) for name, svg in svgs.items()}
    assert {title[1]: name for name, title in titles.items() if title} == shown
    assert len(shown) == len(svgs) == 4


def found_first(query: str, entries: dict[str, tuple[str, ...]]) -> str:
    """The page that the site's search puts first, by the rules of Sphinx's ``searchtools.js``.

    An index entry or a heading counts 100 or 15 times the share of the query in it, from a half on;
    a page with every word counts 15 with one of them in a heading, else 5.
    """
    query = query.lower()
    scores: dict[str, float] = {}
    for path in DOCS.rglob("*.md"):
        page, text = str(path.relative_to(DOCS).with_suffix("")), path.read_text("utf-8").lower()
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        named = [(100, one.lower()) for one in entries.get(page, ())]
        named += [(15, one) for one in headings]
        named = [
            (weight, one) for weight, one in named if query in one and 2 * len(query) >= len(one)
        ]
        hits = [weight * len(query) / len(one) for weight, one in named]
        if all(word in text for word in query.split()):
            hits.append(15 if any(word in str(headings) for word in query.split()) else 5)
        scores[page] = max(hits, default=0)
    return max(scores, key=scores.__getitem__)


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("slow training", "findings/RS001"),
        ("notebook", "python-api"),
        ("CUDA out of memory", "findings/RS120"),
        ("NCCL timeout", "findings/RS209"),
    ],
)
def test_a_search_finds_the_right_page_first(query: str, page: str) -> None:
    assert found_first(query, module_at(DOCS / "conf.py").SEARCHED) == page
