"""Training scripts that people have: from where, with what, what is changed in them.

``rows.yaml`` says it; nothing of the scripts is kept here.
"""

import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

HERE = Path(__file__).resolve().parent
COUNTER = str(HERE / "counting.py")
INPUTS = str(HERE / "inputs.py")


class Source(NamedTuple):
    """A public repository at a commit."""

    owner: str
    commit: str
    license: str


@dataclass(frozen=True)
class Row:
    """One training, with the fields that ``rows.yaml`` explains."""

    name: str
    command: tuple[str, ...]
    source: str = ""
    paths: tuple[str, ...] = ()
    where: str = "."
    copies: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    change: Sequence[Sequence[str]] = ()
    ranks: int = 1
    packages: str = "newest"
    variables: Mapping[str, str] = field(default_factory=dict)
    python_path: tuple[str, ...] = ()
    copied: str = ""
    mended: tuple[str, ...] = ()


_READ = yaml.safe_load((HERE / "rows.yaml").read_text(encoding="utf-8"))
PYTHON: str = _READ["python"]
PACKAGES: dict[str, list[str]] = {name: text.split() for name, text in _READ["packages"].items()}
SOURCES = {name: Source(**about) for name, about in _READ["sources"].items()}


def _words(text: str) -> tuple[str, ...]:
    for _ in range(2):  # one of these texts may hold another
        for name, common in _READ["common"].items():
            text = text.replace(f"{{{name}}}", common)
    return tuple(shlex.split(text))


def _rows() -> list[Row]:
    told: dict[str, dict[str, Any]] = {}
    for row in _READ["rows"]:
        above = told.get(row.pop("like", ""), {})
        more = row.pop("more", "")
        told[row["name"]] = {**above, **row}
        if more:
            told[row["name"]]["command"] = f"{above['command']} {more}"
    for row in told.values():
        row |= {key: _words(row[key]) for key in ("command", "mended") if key in row}
    return [Row(**row) for row in told.values()]


ROWS = _rows()


def put(row: Row, folder: Path, inputs: Path) -> None:
    """Data and texts where the row's script looks for them, and what is changed in it."""
    for name, place in row.copies.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        if (inputs / name).is_dir():
            shutil.copytree(inputs / name, folder / place, dirs_exist_ok=True)
        else:
            shutil.copy(inputs / name, folder / place)
    for place, text in row.files.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text)
    for place, old, new, *every in row.change:
        text = (folder / place).read_text()
        if old not in text and not every:
            raise ValueError(f"{place} is not the version that this row is for")
        changed = text.replace(old, new.replace("{in}", str(inputs)), -1 if every else 1)
        (folder / place).write_text(changed)
