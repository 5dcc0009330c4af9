"""What people read is in the field's own English: words that are not, and where they are."""

from __future__ import annotations

import ast
import functools
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
    # Said as: recompute, or simulate. CUDA graphs are replayed, and so is what a log says of them.
    r"\brepla(?:y|ys|yed|ying)\b",
    # Said as: redundant; op sequence; checkpoint call sites; run record or count; annotation.
    r"\bsurplus\b",
    r"\bstretch(?:es)?\b",
    r"\bwho asked\b",
    r"\b(?:second|two|both|run's) accounts?\b|\baccounts? of (?:a|the|each|its) (?:run|rank)",
    r"\b(?:an?|the|our|its|no|these|those|each|every|without|with) marks?\b(?! a\b)",
    # Said as: is.
    r"\bstands? (?:in|at|beside|under|around|between|before|on|outside|inside|behind)\b"
    r"(?! (?:for|the way)\b)",
}
# What may say so all the same, and why.
EXCEPTIONS = {
    ("docs/design.md", "replayed"): "the glossary tells a CUDA graph's replay from a recompute",
    ("docs/findings/RS122.md", "replay"): "a quoted log, of a CUDA graph",
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


@functools.cache
def texts() -> tuple[tuple[str, str], ...]:
    """All that there is to read, each with its file."""
    written = [(path, path.read_text("utf-8")) for path in (*PAGES, *TEMPLATES)]
    written += [(path, text) for path in MODULES for text in strings(path)]
    return tuple((str(path.relative_to(ROOT)), text) for path, text in written)


@pytest.mark.parametrize("words", sorted(NOT_OURS))
def test_nobody_reads(words: str) -> None:
    found = {
        (place, match[0]) for place, text in texts() for match in re.finditer(words, text, re.I)
    }
    assert not found - EXCEPTIONS.keys()


def test_there_is_much_to_read() -> None:
    assert len(PAGES) > 40
    assert len(TEMPLATES) > 10
    assert len(texts()) > 5000
