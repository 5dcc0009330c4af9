"""What people read is in the field's own English: words that are not, and where they are."""

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
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
# Private English, and what to write instead: the actor and the object by name. Each has a ceiling
# below, which only falls.
UNCLEAR = {
    "told": r"\b(?:told|tells?|telling)\b",
    "said": r"\bsaid\b",
    "of its own": r"\bof (?:its|their|his|my|our|ours|one's) own\b",
    "none of": r"\bnone of\b",
    "nobody": r"\bnobody\b",
    "beside": r"\bbeside\b",
    "those of, that of": r"\b(?:those|that) of\b",
    "whose": r"\bwhose\b",
    "of which": r"\bof (?:which|whom|what)\b",
    "what as a subject": r"(?:^|(?<=[.!?] ))(?:What|Who)\b(?![^.]*\?)|(?<=; )(?:what|who)\b",
}
CEILINGS = {"documents": 0, "messages": 0, "docstrings and comments": 0}
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]
TEMPLATES = list((ROOT / "src").glob("**/*.html"))
MODULES = list((ROOT / "src").glob("**/*.py"))


def strings(path: Path, *, docstrings: bool = True) -> Iterator[str]:
    """Every text in a module, its documentation too; of one with values in it, what is fixed."""
    tree = ast.parse(path.read_text("utf-8"))
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if docstrings or id(node) not in alone:
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


def prose(page: str) -> str:
    """A page without code, headings and the heads of tables."""
    page = re.sub(r"^```.*?^```$|`[^`\n]*`|<!--.*?-->", "", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"^(?:#.*|\|.*\n(?=\| ?--))", "", page, flags=re.MULTILINE)
    return re.sub(r"(?<=\w|,)\n(?=\w)", " ", page)


def unclear(texts: Iterable[str]) -> Counter[str]:
    text = "\n".join(texts)
    return Counter({one: len(re.findall(UNCLEAR[one], text, re.MULTILINE)) for one in UNCLEAR})


def test_private_english_becomes_rarer(capsys: pytest.CaptureFixture[str]) -> None:
    messages = unclear(one for path in MODULES for one in strings(path, docstrings=False))
    comments = (re.findall(r"# (.*)$", path.read_text("utf-8"), re.MULTILINE) for path in MODULES)
    whole = unclear(one for path in MODULES for one in strings(path))
    found = {
        "documents": unclear(prose(path.read_text("utf-8")) for path in PAGES),
        "messages": messages,
        "docstrings and comments": whole - messages + unclear(chain.from_iterable(comments)),
    }
    totals = {kind: counts.total() for kind, counts in found.items()}
    with capsys.disabled():
        print("", *(f"{kind}: {found[kind].most_common()}" for kind in found), totals, sep="\n")
    pages = [path for path in PAGES if unclear([prose(path.read_text("utf-8"))]).total()]
    assert all(totals[kind] <= most for kind, most in CEILINGS.items()), (totals, pages)


def test_the_documents_stay_short() -> None:
    pages = [
        re.sub(r"^ *```.*?^ *```$", "", path.read_text("utf-8"), flags=re.M | re.S)
        for path in PAGES
    ]
    words = sum(len(re.findall(r"\S*\w\S*", page)) for page in pages)
    assert words <= 35_000, "shorten other pages"


def test_the_counter_sees_private_english() -> None:
    assert unclear(["What is told beside it is none of its own."]).total() == 5
    assert unclear(["The report names the line. What is it?"]).total() == 0


def test_there_is_much_to_read() -> None:
    assert len(PAGES) > 40
    assert len(TEMPLATES) > 10
    assert len(texts()) > 5000
