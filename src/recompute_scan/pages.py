"""The pages of the findings, as they ship with the package."""

from __future__ import annotations

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
