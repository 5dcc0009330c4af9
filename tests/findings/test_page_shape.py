"""Every finding's page has one shape: symptom, cause, fix, before and after, sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs" / "findings").glob("RS*.md"))
SHAPE = ("Symptom", "Cause", "Fix", "Before and after", "Sources")
# Between before and after and sources a page may say more, in this order.
MORE = ("When it fires, and when it stays silent", "The numbers", "Limits")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def sections(text: str, level: int) -> list[tuple[str, str]]:
    """Headings of that level with what stands below each; what code has like them is none."""
    bare = _FENCE.sub(lambda fence: re.sub(r"^#", "\\#", fence[0], flags=re.MULTILINE), text)
    parts = re.split(rf"^{'#' * level} (.*)\n", bare, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_what_is_seen_why_and_what_to_do(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    (title,) = (name for name, _ in sections(text, 1))
    assert title.startswith(f"{page.stem} ")
    # a failure's page has a part for each cause, and the shape in each of them
    causes = [sections(text, 2)]
    if causes[0][0][0] != SHAPE[0]:
        causes = [sections(below, 3) for _, below in causes[0]]
    for found in causes:
        names = [name for name, _ in found]
        assert [name for name in names if name in SHAPE] == list(SHAPE)
        assert names[-1] == SHAPE[-1]
        assert [name for name in names if name not in SHAPE] == [n for n in MORE if n in names]
        assert all(below.strip() for _, below in found)
        said = dict(found)
        assert re.search(r"https://|\]\(", said["Sources"]), "no source is linked"
        assert re.search(r"\bAfter\b|```diff", said["Before and after"])


def test_there_is_a_page_of_every_kind() -> None:
    assert {"RS001", "RS101", "RS201", "RS301", "RS401", "RS501", "RS601"} <= {
        page.stem for page in PAGES
    }
