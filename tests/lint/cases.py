"""The cases of ``cases.yaml``: scripts and configurations with what is true of them."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from recompute_scan.lint import lint


class Case(NamedTuple):
    """Files by name, the codes that are true of them, and how that is known."""

    name: str
    files: dict[str, str]
    codes: tuple[str, ...]
    known: str
    origin: str = ""


_TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
PARTS: dict[str, str] = _TABLE["parts"]


def _cases(group: str) -> tuple[Case, ...]:
    return tuple(
        Case(
            row["name"],
            {name: _whole(text) for name, text in row["files"].items()},
            tuple(row.get("codes", "").split()),
            row["known"],
            row.get("origin", ""),
        )
        for row in _TABLE[group]
    )


def _whole(text: str) -> str:
    """The text with its parts in place of their names."""
    return re.sub(r"^<<(\w+)>>\n", lambda found: PARTS[found[1]], text, flags=re.MULTILINE)


def answer(case: Case, folder: Path) -> tuple[str, ...]:
    """The codes that are found in the case's files, written to the folder."""
    for name, text in case.files.items():
        (folder / name).write_text(text)
    return tuple(finding.code for finding in lint([folder]).found)


CASES, FRAMEWORKS, HELD_OUT, FOUND = map(_cases, ("pairs", "frameworks", "held out", "found"))
