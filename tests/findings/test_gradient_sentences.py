"""What is recommended and can change gradients says so, on the finding's page and in its fix."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import recompute_scan
from tests.findings.test_page_shape import box

TOUCHES = re.compile(
    r"preserve_rng_state|determinism_check|use_reentrant|reentrant variant"
    r"|BatchNorm|keeps the buffer|create_selective_checkpoint_contexts|autocast"
)
SOURCE = Path(recompute_scan.__file__).parent
# Failures have fixes, and pages made from them; see tests/diagnose/test_gradients.py.
ELSEWHERE = {"diagnose"}
PAGES = sorted((Path(__file__).parents[2] / "docs" / "findings").glob("RS[03-6]*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_what_its_change_does_to_gradients(page: Path) -> None:
    assert re.search(r"[Gg]radients", box(page.read_text(encoding="utf-8"))["Safe?"])


def _fixes() -> Iterator[tuple[str, ast.FunctionDef, ast.Call]]:
    for file in sorted(SOURCE.rglob("*.py")):
        if file.relative_to(SOURCE).parts[0] in ELSEWHERE:
            continue
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Fix":
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
    assert len(PAGES) > 20
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
