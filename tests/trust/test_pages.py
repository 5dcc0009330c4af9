"""Pages that name a test for each promise name one that exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEST = r"`(tests/[\w/]+\.py)::(test_\w+)`"


def names_in(path: Path) -> set[str]:
    """The names of the tests of a file, without those that are always skipped."""
    return {
        one.name
        for one in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(one, ast.FunctionDef)
        and not any(
            ast.unparse(mark).startswith("pytest.mark.skip(") for mark in one.decorator_list
        )
    }


@pytest.mark.parametrize("name", ["security.md", "trace-formats.md"])
def test_each_row_has_its_test(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    tables = re.findall(r"^\| .* \| test \|\n\| --.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    rows = [line.strip("|").split(" | ") for table in tables for line in table.splitlines()]
    assert len(rows) > 15
    named = []
    for promise, *_, cell in rows:
        assert re.fullmatch(rf"{TEST}(?:, {TEST})*", cell.strip()), promise
        named += re.findall(TEST, cell)
    for file in re.findall(r"tests/[\w/]+\.py", page):
        assert (ROOT / file).is_file(), file
    for file, test in named:
        assert test in names_in(ROOT / file), f"{file}::{test}"


def test_every_table_of_the_security_page_names_tests() -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    heads = re.findall(r"^(\|.*\|)\n\| --", page, re.MULTILINE)
    assert set(heads) == {"| threat | measure | test |"}
