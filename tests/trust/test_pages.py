"""Pages that name a test for each row keep their word; pins and hashes agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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


def test_the_lock_holds_the_pins() -> None:
    """After a change of constraints.txt: make lock."""
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    locked = dict(re.findall(r"^([\w.\-]+)==([\w.]+) ?\\?$", text, re.MULTILINE))
    hashed = re.findall(r"^([\w.\-]+)==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)
    assert set(hashed) == set(locked)
    environment = {"python_version": "3.11", "python_full_version": "3.11.5"}
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate(environment):
                pins[normal(pin.name)] = str(pin.specifier).removeprefix("==")
    del pins["torch"]
    assert {normal(name): version for name, version in locked.items()} == pins
    assert "://" not in text  # whose index it came from is nobody's business


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
