"""A unified diff, line by line, for colouring."""

from __future__ import annotations

from msgspec import Struct

from recompute_scan.report.escape import lines


class DiffLine(Struct, frozen=True):
    """One line of a diff: ``kind`` is ``add``, ``del``, ``hunk``, ``file`` or ``same``."""

    kind: str
    text: str


def diff_lines(diff: str) -> list[DiffLine]:
    """The lines with their kinds; the text itself is not changed."""
    return [DiffLine(_kind(line), line) for line in lines(diff.rstrip("\n"))]


def _kind(line: str) -> str:
    if line.startswith(("+++", "---", "diff ", "index ")):
        return "file"
    if line.startswith("@@"):
        return "hunk"
    return {"+": "add", "-": "del"}.get(line[:1], "same")
