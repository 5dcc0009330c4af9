"""What people read is in the field's own English: words that are not, and where they stand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_OURS = {
    # Said as: around.
    r"\bround (?:a|an|the|each|it|them|every|which|another|both|all|whose|torch's)\b",
    # Said as: per step.
    r"(?:\bms|\btimes|\bredundant|\bcalls|\}) a step\b(?! takes)",
    # Said as: expensive; so that … not; ran to its end.
    r"\bdear\b",
    r"\blest\b",
    r"\bc[ao]mes? through\b",
}
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]
TEMPLATES = list((ROOT / "src").glob("**/*.html"))
MODULES = list((ROOT / "src").glob("**/*.py"))


def strings(path: Path) -> Iterator[str]:
    """Every text in a module, its documentation too; of one with values in it, what is fixed."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )


def texts() -> Iterator[tuple[str, str]]:
    for path in (*PAGES, *TEMPLATES):
        yield str(path.relative_to(ROOT)), path.read_text("utf-8")
    for path in MODULES:
        for text in strings(path):
            yield str(path.relative_to(ROOT)), text


@pytest.mark.parametrize("words", sorted(NOT_OURS))
def test_nobody_reads(words: str) -> None:
    found = [
        (place, match[0]) for place, text in texts() for match in re.finditer(words, text, re.I)
    ]
    assert not found


def test_there_is_much_to_read() -> None:
    assert len(PAGES) > 40
    assert len(TEMPLATES) > 10
    assert sum(1 for _ in texts()) > 5000
