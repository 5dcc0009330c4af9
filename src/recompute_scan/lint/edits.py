"""The edits that findings ask for, as one unified diff that ``patch -p1`` takes."""

from __future__ import annotations

import ast
import difflib
import os
import re
import warnings
from collections.abc import Iterable
from pathlib import Path

from recompute_scan.lint.said import Found

_ON = re.compile(r"^(\s*[\"']?[\w.-]+[\"']?\s*[:=]\s*)([\"']?)(true|yes|on)\2", re.IGNORECASE)


def diff(found: Iterable[Found]) -> str:
    """The edits of all findings that have one, file by file; empty where none has.

    A file is read again here. What has changed since, or what an edit of lines cannot do, is left
    out: a statement among others on its line, a value that the line does not hold.
    """
    by_file: dict[str, list[Found]] = {}
    for finding in found:
        if finding.edit:
            by_file.setdefault(finding.file, []).append(finding)
    parts = []
    for file, findings in sorted(by_file.items()):
        with Path(file).open(encoding="utf-8", errors="surrogateescape", newline="") as stream:
            before = stream.read().splitlines(keepends=True)
        after = _edited(before, findings)
        name = os.path.relpath(file).replace(os.sep, "/")
        name += "\t" * (" " in name)  # as git ends such a name
        lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
        for line in lines:
            parts.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(parts)


def _edited(before: list[str], findings: list[Found]) -> list[str]:
    after: list[str | None] = list(before)
    for finding in findings:
        if finding.edit == "off":
            _switch_off(after, finding.line)
        else:
            _delete(after, before, finding.line)
    return [line for line in after if line is not None]


def _switch_off(after: list[str | None], line: int) -> None:
    text = after[line - 1] if 0 < line <= len(after) else None
    said = _ON.match(text or "")
    if text is None or said is None:
        return
    off = {"true": "false", "yes": "no", "on": "off"}[said[3].lower()]
    off = off.capitalize() if said[3][0].isupper() else off
    after[line - 1] = f"{said[1]}{said[2]}{off}{text[said.end(3) :]}"


def _delete(after: list[str | None], before: list[str], line: int) -> None:
    """Delete the statement that is at a line, or put ``pass`` where it was its block's only one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse("".join(before))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for parent in ast.walk(tree):
        for body in (getattr(parent, arm, None) for arm in ("body", "orelse", "finalbody")):
            if not isinstance(body, list):
                continue
            for statement in body:
                if not isinstance(statement, ast.Expr) or statement.end_lineno is None:
                    continue
                if not statement.lineno <= line <= statement.end_lineno:
                    continue
                first, last = statement.lineno - 1, statement.end_lineno - 1
                if not _alone(before[first][: statement.col_offset], before[last], statement):
                    return
                keep = None if len(body) > 1 else before[first][: statement.col_offset] + "pass\n"
                after[first : last + 1] = [keep] + [None] * (last - first)
                return


def _alone(indent: str, last: str, statement: ast.Expr) -> bool:
    rest = last.encode()[statement.end_col_offset :].decode(errors="replace").strip()
    return not indent.strip() and (not rest or rest.startswith("#"))
