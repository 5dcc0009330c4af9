"""The pages of the findings and of the messages, as they ship with the package."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent
# In a checkout, where they are written; a wheel has them as one file beside this one.
_DOCS = _HERE.parents[1] / "docs"
# Their headings; in code blocks a comment looks like one.
_PAGE = re.compile(r"^(?=# (?:RS\d{3} |Messages$))", re.MULTILINE)


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
    pages = _PAGE.split(_text())
    return {text[2:7]: text.rstrip("\n") + "\n" for text in pages if text.startswith("# RS")}


def message(code: str) -> str | None:
    """What the documentation says of an error, as Markdown; ``None`` where there is none."""
    return messages().get(code.upper())


def messages() -> dict[str, str]:
    """What the documentation says of every error, by its code, heading first."""
    text = _PAGE.split(_text())[-1]
    parts = re.split(r"^(?=#{2,3} )", text, flags=re.MULTILINE)
    return {part[4:8]: part for part in parts if part.startswith("### E")}


@cache
def _text() -> str:
    together = _HERE / "pages.md"
    files = [*sorted((_DOCS / "findings").glob("RS*.md")), _DOCS / "messages.md"]
    found = [together] if together.is_file() else [one for one in files if one.is_file()]
    return "\n".join(one.read_text(encoding="utf-8") for one in found)
