"""The pages of the findings and of the messages, as they ship with the package."""

from __future__ import annotations

import re
from functools import cache

from recompute_scan import package_texts
from recompute_scan.diagnose.causes import names
from recompute_scan.diagnose.failure_pages import examples_of, failure_page


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
    """All of them. Those of failures are made here: of theirs, a wheel has the examples alone."""
    found = {}
    failures = names()
    for name in package_texts.names("docs/findings/"):
        code, page = name[-8:-3], package_texts.text(name) or ""
        made = failure_page(code, examples_of(page)) if code in failures else page
        found[code] = made.rstrip("\n") + "\n"
    return found


def message(code: str) -> str | None:
    """What the documentation says of an error, as Markdown; ``None`` where there is none."""
    return messages().get(code.upper())


def messages() -> dict[str, str]:
    """What the documentation says of every error, by its code, heading first."""
    whole = package_texts.text("docs/messages.md") or ""
    parts = re.split(r"^(?=#{2,3} )", whole, flags=re.MULTILINE)
    return {part[4:8]: part for part in parts if part.startswith("### E")}
