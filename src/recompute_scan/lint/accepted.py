"""Comments that accept a finding, and those that accept nothing."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Iterator

from msgspec import Struct

from recompute_scan.lint.said import Found
from recompute_scan.run_info import source_lines

_OURS = re.compile(r"#\s*recompute-scan:\s*ignore(?:\[([^\]]{0,200})\])?\s*(\S.*)?")
_NOQA = re.compile(
    r"#\s*noqa:\s*([A-Z]+\d+(?:[\s,]+[A-Z]+\d+)*)(?:\s*[-:]\s*(\S.*))?", re.IGNORECASE
)


_ANY = re.compile(r"recompute-scan|noqa", re.IGNORECASE)


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
    found: list[Acceptance] = []
    if not _ANY.search(text):
        return found
    for number, comment, alone in _comments(text) if python else _lines(text):
        ours, noqa = _OURS.search(comment), _NOQA.search(comment)
        said = ours or noqa
        if said is None:
            continue
        codes = {code.upper() for code in re.split(r"[\s,]+", said[1] or "") if code}
        mine = frozenset(code for code in codes if code.startswith("RS"))
        if noqa is said and not mine:
            continue  # another tool's
        found.append(Acceptance(number, number + alone, mine, (said[2] or "").strip()))
    return found


def _comments(text: str) -> Iterator[tuple[int, str, bool]]:
    """Python's comments, each with its line and whether it stands alone there."""
    try:
        for token in tokenize.generate_tokens(io.StringIO(text, newline=None).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string, not token.line[: token.start[1]].strip()
    except (tokenize.TokenError, SyntaxError):
        return


def _lines(text: str) -> Iterator[tuple[int, str, bool]]:
    for number, line in enumerate(source_lines(text), 1):
        if "#" in line:
            yield number, line, line.lstrip().startswith("#")


def sorted_out(
    file: str, found: Iterable[Found], accepting: Iterable[Acceptance]
) -> tuple[list[Found], list[Found], list[Unused]]:
    """What is kept of a file's findings, what is accepted, and comments that accept nothing."""
    everything = list(found)
    at_line: dict[int, list[Found]] = {}
    for finding in everything:
        at_line.setdefault(finding.line, []).append(finding)
    hidden: set[Found] = set()
    idle: list[Unused] = []
    for comment in accepting:
        accepts = [
            finding
            for line in {comment.at, comment.line}
            for finding in at_line.get(line, ())
            if not comment.codes or finding.code in comment.codes
        ]
        if not accepts:
            idle.append(Unused(file, comment.line, "nothing of that is found here"))
        elif not comment.reason:
            idle.append(Unused(file, comment.line, "it gives no reason, and accepts nothing"))
        else:
            hidden.update(accepts)
    kept = [finding for finding in everything if finding not in hidden]
    return kept, [finding for finding in everything if finding in hidden], idle
