"""Pages that name a test for each row name one that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["security.md", "trace-formats.md"])
def test_each_row_has_its_test(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    tables = re.findall(r"^\| .* \| test \|\n\| --.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    rows = [line.strip("|").split(" | ") for table in tables for line in table.splitlines()]
    assert len(rows) > 15
    for threat, *_, cell in rows:
        test = cell.strip()
        found = re.fullmatch(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", test)
        assert found, threat
        text = (ROOT / found[1]).read_text(encoding="utf-8")
        assert found[2] is None or f"def {found[2]}(" in text, test
