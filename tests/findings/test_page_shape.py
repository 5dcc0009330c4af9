"""Every finding's page has one shape: a box with symptom, cost, safety and fix, then the rest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs" / "findings").glob("RS*.md"))
BOX = ("Symptom", "Cost", "Safe?", "Fix")
# In this order. A failure's page has a heading for each of its causes instead of the first ones.
HEADINGS = (
    *("Cause", "More on the fix", "Which one to keep", "Before and after"),
    *("When it fires", "The numbers", "Sources"),
)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def box(text: str) -> dict[str, str]:
    """The rows of the table below the title."""
    _, _, rest = text.partition("\n\n")
    rows = [line.strip("| ").split(" | ", 1) for line in rest.partition("\n\n")[0].splitlines()]
    assert rows.pop(1) == ["---", "---"]
    return dict(rows)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_begins_with_its_box(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {page.stem} ")
    found = box(text)
    assert tuple(found) == BOX
    for name, cell in found.items():
        assert len(cell.split()) <= 35, name
        assert not cell.endswith("."), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_its_parts_in_order(page: Path) -> None:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert headings[-1] == "Sources"
    assert re.search(r"https://|\]\(", text.rpartition("## Sources")[2]), "no source is linked"
    if set(headings) <= set(HEADINGS):
        assert headings == [name for name in HEADINGS if name in headings]
    else:
        causes = re.split(r"^## ", text.rpartition("## Sources")[0], flags=re.MULTILINE)[1:]
        for cause in causes:
            assert len(re.findall(r"\n\n\*\*Fix\.\*\* ", cause)) == 1, cause
            assert re.search(r"^\*[^*]+\.\*$", cause, re.MULTILINE), cause


def test_before_and_after_shows_a_change() -> None:
    texts = [page.read_text("utf-8").partition("## Before and after\n")[2] for page in PAGES]
    shown = [text.partition("\n## ")[0] for text in texts if text]
    assert len(shown) > 10
    assert all(re.search(r"```diff\n(?:.*\n)*?-", text) for text in shown)
