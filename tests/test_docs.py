"""The pages that follow from the code are what the code gives."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from recompute_scan import pages
from recompute_scan.diagnose.outcome import names

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


def test_the_generated_pages_are_true(generator: ModuleType) -> None:
    assert {"commands.md", "result-fields.md", "findings/RS101.md"} <= set(generator.PAGES)
    for page, write in generator.PAGES.items():
        written, now = (DOCS / page).read_text(encoding="utf-8"), write()
        if page.endswith(".html"):  # how a template is indented is no content
            written, now = " ".join(written.split()), " ".join(now.split())
        assert written == now, f"{page}: run python docs/generate.py (make fix does)"


def test_each_failure_that_is_recognized_has_a_page() -> None:
    paths = sorted((DOCS / "findings").glob("RS[12]??.md"))
    assert [path.stem for path in paths] == [*names()]
    assert {path.stem for path in paths} <= set(pages.titles())


def test_the_badges_of_the_readme_say_what_they_show(generator: ModuleType) -> None:
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"!\[(.+)\]\(docs/(img/badge-.+\.svg)\)", readme))
    svgs = {name: svg for name, svg in generator.PAGES.items() if "badge-" in name}
    titles = {name: re.search("<title>(.+)</title>", svg()) for name, svg in svgs.items()}
    assert {title[1]: name for name, title in titles.items() if title} == shown
    assert len(shown) == len(svgs) == 4


def found_first(query: str, entries: dict[str, tuple[str, ...]]) -> str:
    """The page that the site's search puts first, by the rules of Sphinx's ``searchtools.js``.

    An index entry or a heading counts where it has the query and is at most twice as long: 100 or
    15 times the share of the query. Else every word must be in the page: 15 with one in a heading,
    5 without.
    """
    query = query.lower()
    scores: dict[str, float] = {}
    for path in DOCS.rglob("*.md"):
        page = path.relative_to(DOCS).with_suffix("").as_posix()
        text = path.read_text(encoding="utf-8").lower()
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        named = [(100, entry.lower()) for entry in entries.get(page, ())]
        named += [(15, heading) for heading in headings]
        hits = [
            weight * len(query) / len(name)
            for weight, name in named
            if query in name and 2 * len(query) >= len(name)
        ]
        if all(word in text for word in query.split()):
            hits.append(15 if any(w in h for w in query.split() for h in headings) else 5)
        scores[page] = max(hits, default=0)
    best = max(scores.values())
    (first,) = [page for page, score in scores.items() if score == best]
    return first


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("slow training", "findings/RS001"),
        ("notebook", "python-api"),
        ("CUDA out of memory", "findings/RS120"),
        ("NCCL timeout", "findings/RS209"),
        ("hang", "diagnoses"),
        ("install", "recording"),
    ],
)
def test_a_search_finds_the_right_page_first(query: str, page: str) -> None:
    assert found_first(query, module_at(DOCS / "conf.py").SEARCHED) == page
