"""Pages of findings have one shape and say what a fix does to gradients; mechanisms are all listed.

``python -m tests.findings.test_pages`` writes the table of mechanisms anew.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import recompute_scan
from recompute_scan.frameworks.base import Mechanism
from recompute_scan.frameworks.registry import MECHANISMS

PAGES = sorted((Path(__file__).parents[2] / "docs" / "findings").glob("RS*.md"))
BOX = ("Symptom", "Cost", "Safe?", "Fix")
# In this order. A failure's page has a heading for each of its causes instead of the first ones.
HEADINGS = (
    *("Cause", "Fix", "Which one to keep", "Before and after"),
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


TOUCHES = re.compile(
    r"preserve_rng_state|determinism_check|use_reentrant|reentrant variant"
    r"|BatchNorm|keeps the buffer|create_selective_checkpoint_contexts|autocast"
)
SOURCE = Path(recompute_scan.__file__).parent
# Failures have fixes, and pages made from them; see tests/diagnose/test_gradients.py.
ELSEWHERE = {"diagnose"}
MAKERS = ("Fix", "review")
OF_TRAININGS = [page for page in PAGES if re.match("RS[03-6]", page.stem)]


@pytest.mark.parametrize("page", OF_TRAININGS, ids=lambda page: page.stem)
def test_a_page_says_what_its_change_does_to_gradients(page: Path) -> None:
    assert re.search(r"[Gg]radients", box(page.read_text(encoding="utf-8"))["Safe?"])


def _fixes() -> Iterator[tuple[str, ast.FunctionDef, ast.Call]]:
    for file in sorted(SOURCE.rglob("*.py")):
        if file.relative_to(SOURCE).parts[0] in ELSEWHERE:
            continue
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in MAKERS:
                        yield f"{file.stem}:{node.lineno}", function, node


def _text(node: ast.AST) -> str:
    """All text that is written out in it, without a docstring, and the names of constants."""
    parts = [
        one.value if isinstance(one, ast.Constant) else one.id
        for part in (node.body[1:] if isinstance(node, ast.FunctionDef) else [node])
        for one in ast.walk(part)
        if isinstance(one, ast.Name)
        or (isinstance(one, ast.Constant) and isinstance(one.value, str))
    ]
    return " ".join(map(str, parts))


FIXES = list(_fixes())


def test_fixes_are_found() -> None:
    assert len(OF_TRAININGS) > 20
    assert len(FIXES) > 10
    assert sum(bool(TOUCHES.search(_text(function))) for _, function, _ in FIXES) >= 3


@pytest.mark.parametrize("fix", FIXES, ids=lambda fix: fix[0])
def test_a_fix_says_what_it_does_to_gradients(
    fix: tuple[str, ast.FunctionDef, ast.Call],
) -> None:
    _, function, call = fix
    if not TOUCHES.search(_text(function)):
        return
    reasons = [word.value for word in call.keywords if word.arg == "reason"]
    assert reasons, "no reason is given"
    told = re.compile(r"[Gg]radient|trained|[Ss]tatistics|NON_REENTRANT|RANDOM_STATE")
    assert told.search(_text(reasons[0])), _text(reasons[0])


PAGE = Path(__file__).parents[2] / "docs" / "mechanisms.md"
BEGIN = "<!-- Made by `python -m tests.findings.test_pages`. -->\n\n"
HEAD = "| mechanism | variant | to take it out | priority | checked |"


def table() -> str:
    rows = [HEAD, "| " + " | ".join(["---"] * 5) + " |", *map(row, MECHANISMS)]
    return "\n".join(rows) + "\n"


def row(mechanism: Mechanism) -> str:
    sharded = f", FSDP {mechanism.keep_sharded}" if mechanism.keep_sharded else ""
    # The page has one sentence for all who share a configuration, and one for the cache.
    note = (mechanism.caution or "").partition(":")[0].rstrip(".")
    caution = (
        f". {note}" if note and not note.startswith(("Check whether", "With a KV cache")) else ""
    )
    cells = [
        mechanism.title,
        "; ".join(mechanism.variants),
        mechanism.remove + caution,
        f"{mechanism.keep}{sharded}",
        mechanism.checked,
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def test_the_page_agrees_with_the_registry() -> None:
    _, found, written = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    assert found
    assert written == table()


def test_every_fact_is_told() -> None:
    for mechanism in MECHANISMS:
        assert mechanism.variants
        assert mechanism.checked.startswith(("ran here", "read", "known from"))
        assert mechanism.docs.startswith("https://")
        assert not mechanism.remove.endswith(".")
        assert not mechanism.why_keep.endswith(".")


if __name__ == "__main__":
    head, _, _ = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(head + BEGIN + table(), encoding="utf-8")
