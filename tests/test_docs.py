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
