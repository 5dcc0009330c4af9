"""The page on mechanisms lists exactly what the registry holds.

``python -m tests.findings.test_mechanisms_page`` writes the table anew.
"""

from __future__ import annotations

from pathlib import Path

from recompute_scan.frameworks.base import Mechanism
from recompute_scan.frameworks.registry import MECHANISMS

PAGE = Path(__file__).parents[2] / "docs" / "mechanisms.md"
BEGIN = "<!-- Made by `python -m tests.findings.test_mechanisms_page`. -->\n\n"
HEAD = "| mechanism | variant | to take it out | rank | checked |"


def table() -> str:
    rows = [HEAD, "| " + " | ".join(["---"] * 5) + " |", *map(row, MECHANISMS)]
    return "\n".join(rows) + "\n"


def row(mechanism: Mechanism) -> str:
    sharded = f", FSDP {mechanism.keep_sharded}" if mechanism.keep_sharded else ""
    # The page has one sentence for those who share a configuration.
    note = (mechanism.caution or "").partition(":")[0].rstrip(".")
    caution = f". {note}" if note and not note.startswith("Look whether") else ""
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
