"""Comments that accept a finding, and those that accept nothing."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable

from msgspec import Struct

from recompute_scan.lint.said import Found

_OURS = re.compile(r"#\s*recompute-scan:\s*ignore(?:\[([^\]]*)\])?\s*(\S.*)?")
_NOQA = re.compile(
    r"#\s*noqa:\s*([A-Z]+\d+(?:[\s,]+[A-Z]+\d+)*)(?:\s*[-:]\s*(\S.*))?", re.IGNORECASE
)


class Acceptance(Struct, frozen=True):
    """A comment that accepts findings of its line, or of the next where it stands alone.

    Attributes:
        line: The comment's own.
        at: The line whose findings it accepts.
        codes: Which; empty for all.
        reason: Why, as written; one is needed.
    """

    line: int
    at: int
    codes: frozenset[str]
    reason: str


class Unused(Struct, frozen=True, order=True):
    """A comment that accepts nothing, and why."""

    file: str
    line: int
    why: str


def acceptances(text: str, *, python: bool) -> list[Acceptance]:
    """The comments of one file."""
    found = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        ours, noqa = _OURS.search(line), _NOQA.search(line)
        said = ours or noqa
        if said is None or (python and not _is_comment(lines, number, said.start())):
            continue
        codes = {code.upper() for code in re.split(r"[\s,]+", said[1] or "") if code}
        mine = frozenset(code for code in codes if code.startswith("RS"))
        if noqa is said and not mine:
            continue  # another tool's
        alone = line.lstrip().startswith("#")
        found.append(Acceptance(number, number + alone, mine, (said[2] or "").strip()))
    return found


def sorted_out(
    file: str, found: Iterable[Found], accepting: Iterable[Acceptance]
) -> tuple[list[Found], list[Found], list[Unused]]:
    """What is kept of a file's findings, what is accepted, and comments that accept nothing."""
    kept = list(found)
    hidden: list[Found] = []
    idle: list[Unused] = []
    for comment in accepting:
        accepts = [
            finding
            for finding in (*kept, *hidden)
            if finding.line in (comment.at, comment.line)
            and (not comment.codes or finding.code in comment.codes)
        ]
        if not accepts:
            idle.append(Unused(file, comment.line, "nothing of that is found here"))
        elif not comment.reason:
            idle.append(Unused(file, comment.line, "it gives no reason, and accepts nothing"))
        else:
            hidden += [finding for finding in accepts if finding in kept]
            kept = [finding for finding in kept if finding not in accepts]
    return kept, hidden, idle


def _is_comment(lines: list[str], number: int, start: int) -> bool:
    """Whether the sign begins a comment there, and not a part of a text."""
    try:
        for token in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
            if token.type == tokenize.COMMENT and token.start[0] == number:
                return token.start[1] <= start
            if token.start[0] > number:
                return False
    except (tokenize.TokenError, SyntaxError):
        pass
    return False
