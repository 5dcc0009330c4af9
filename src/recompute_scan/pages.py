"""The pages of the findings and of the messages, as they ship with the package."""

from __future__ import annotations

import re
from pathlib import Path

_HERE = Path(__file__).parent
# In a wheel beside this file; in a checkout, where they are written.
_FOLDERS = (_HERE / "finding_pages", _HERE.parents[1] / "docs" / "findings")


def page(code: str) -> str | None:
    """The page of the finding with this code, as Markdown; ``None`` where there is none."""
    if not code.isalnum():
        return None
    for folder in _FOLDERS:
        path = folder / f"{code.upper()}.md"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None


def titles() -> dict[str, str]:
    """The name of every finding by its code, in order of the codes."""
    found = {}
    for path in sorted(_FOLDERS[0].glob("RS*.md")) or sorted(_FOLDERS[1].glob("RS*.md")):
        with path.open(encoding="utf-8") as file:
            code, _, name = file.readline().removeprefix("# ").strip().partition(" ")
        found[code] = name
    return found


def message(code: str) -> str | None:
    """What the documentation says of an error, as Markdown; ``None`` where there is none."""
    return messages().get(code.upper())


def messages() -> dict[str, str]:
    """What the documentation says of every error, by its code, heading first."""
    for folder in (_HERE, _FOLDERS[1].parent):
        path = folder / "messages.md"
        if path.is_file():
            parts = re.split(r"^(?=#{2,3} )", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            return {part[4:8]: part for part in parts if part.startswith("### E")}
    return {}
