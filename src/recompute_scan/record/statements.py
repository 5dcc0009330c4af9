"""The statement of a source file that holds a line, found by parsing the file."""

from __future__ import annotations

import ast
import linecache
from pathlib import Path

from recompute_scan.run_info import Source

CONTEXT = 3


def statement_at(path: Path, line: int) -> Source | None:
    """The innermost statement that spans ``line``, with three lines round it.

    ``None`` where the file cannot be read or parsed, or has no statement there.

    Args:
        path: A Python file.
        line: Line number, from 1.
    """
    try:
        # Cells of a notebook are in no file; IPython keeps them where tracebacks find them.
        kept = str(path) in linecache.cache and not path.exists()
        text = "".join(linecache.getlines(str(path))) if kept else path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    found = _innermost(tree, line)
    if found is None:
        return None
    statement, alone = found
    lines = text.splitlines()
    begin, end = statement.lineno, _end(statement)
    first = max(1, begin - CONTEXT)
    return Source(
        first=first,
        text="\n".join(lines[first - 1 : end + CONTEXT]),
        begin=begin,
        end=end,
        alone=alone,
        whole_lines=_whole_lines(statement, lines),
    )


def _innermost(tree: ast.AST, line: int) -> tuple[ast.stmt, bool] | None:
    best: tuple[ast.stmt, bool] | None = None
    for node in ast.walk(tree):
        for _, block in ast.iter_fields(node):
            if not isinstance(block, list):
                continue
            for child in block:
                if not isinstance(child, ast.stmt):
                    continue
                if child.lineno <= line <= (child.end_lineno or child.lineno):
                    # Breadth first: a later match lies deeper.
                    best = (child, len(block) == 1 and not isinstance(node, ast.Module))
    return best


def _end(statement: ast.stmt) -> int:
    """Last line; of a compound statement its header's, the only place left for the line."""
    body = getattr(statement, "body", None)
    if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
        return max(statement.lineno, body[0].lineno - 1)
    return statement.end_lineno or statement.lineno


def _whole_lines(statement: ast.stmt, lines: list[str]) -> bool:
    if hasattr(statement, "body"):
        return False  # a header cannot go without what hangs on it
    before = lines[statement.lineno - 1].encode()[: statement.col_offset]
    last = lines[(statement.end_lineno or statement.lineno) - 1].encode()
    after = last[statement.end_col_offset :].decode(errors="replace").strip()
    return not before.strip() and (not after or after.startswith("#"))
