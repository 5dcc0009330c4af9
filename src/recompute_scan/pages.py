"""The pages of the findings and of the messages.

A checkout has them in ``docs/``, an installed package in ``recompute_scan/docs/``, as the same
files.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path


def page(code: str) -> str | None:
    """The page of the finding with this code, as Markdown; ``None`` where there is none."""
    return _pages().get(code.upper())


def titles() -> dict[str, str]:
    """The name of every finding by its code, in order of the codes."""
    return {
        code: text.partition("\n")[0][len("# RS000 ") :].strip() for code, text in _pages().items()
    }


@cache
def _pages() -> dict[str, str]:
    paths = sorted((_docs() / "findings").glob("RS*.md"))
    return {path.stem: path.read_text(encoding="utf-8").rstrip("\n") + "\n" for path in paths}


def _docs() -> Path:
    """The folder of the pages, in an installed package or in a checkout."""
    here = Path(__file__).parent
    installed = here / "docs"
    return installed if installed.is_dir() else here.parents[1] / "docs"


def message(code: str) -> str | None:
    """The documentation of an error, as Markdown; ``None`` where there is none."""
    return messages().get(code.upper())


def messages() -> dict[str, str]:
    """The documentation of every error, by its code, heading first."""
    path = _docs() / "messages.md"
    page = path.read_text(encoding="utf-8") if path.is_file() else ""
    parts = re.split(r"^(?=#{2,3} )", page, flags=re.MULTILINE)
    return {part[4:8]: part for part in parts if part.startswith("### E")}
