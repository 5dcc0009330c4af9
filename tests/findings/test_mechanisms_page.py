"""The page on mechanisms lists exactly what the registry holds.

``python -m tests.findings.test_mechanisms_page`` writes the table anew.
"""

from __future__ import annotations

from pathlib import Path

from recompute_scan.frameworks.base import Mechanism
from recompute_scan.frameworks.registry import MECHANISMS
from recompute_scan.recompute.vocabulary import CHECKPOINT_FUNCTIONS

PAGE = Path(__file__).parents[2] / "docs" / "mechanisms.md"
BEGIN = "<!-- Made by `python -m tests.findings.test_mechanisms_page`. -->\n\n"
HEAD = (
    "| mechanism | asked by | switched on by | variant | why keep it | to take it out | checked "
    "| keep | own function in traces |"
)


def table() -> str:
    rows = [HEAD, "| " + " | ".join(["---"] * 9) + " |", *map(row, MECHANISMS)]
    return "\n".join(rows) + "\n"


def row(mechanism: Mechanism) -> str:
    functions = [name for name, owner in CHECKPOINT_FUNCTIONS.items() if owner == mechanism.name]
    cells = [
        f"`{mechanism.name}`: {mechanism.title}",
        code(mechanism.asks),
        code(mechanism.switched_by or mechanism.switches),
        "; ".join(mechanism.variants),
        mechanism.why_keep,
        mechanism.remove + (f". {mechanism.caution}" if mechanism.caution else ""),
        mechanism.checked,
        str(mechanism.keep)
        + (f"; under FSDP {mechanism.keep_sharded}" if mechanism.keep_sharded else ""),
        code(tuple(functions)),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def code(names: tuple[str, ...]) -> str:
    return " ".join(f"`{name}`" for name in names) or "-"


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
