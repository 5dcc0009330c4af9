"""A statement of the user's code, changed so that a mechanism is out, and the change as a diff.

The statement is found by parsing; `git apply` and `patch` take the diff.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence

from recompute_scan.frameworks.base import Edit, opposite
from recompute_scan.result.run_record import Source
from recompute_scan.terminal import patch_name


def change_diff(site: str, source: Source, new: Sequence[str]) -> str:
    """A diff that puts ``new`` lines in the place of one statement of the file of ``site``.

    Args:
        site: The call site, ``file:line``.
        source: The statement there, with the lines around it.
        new: The lines that take its place; none to delete it.
    """
    path = site.rpartition(":")[0]
    lines = source.text.split("\n")
    before = lines[: source.begin - source.first]
    removed = lines[source.begin - source.first : source.end - source.first + 1]
    after = lines[source.end - source.first + 1 :]
    old, left = len(lines), len(lines) - len(removed) + len(new)
    # A range of no lines is given by the line before it.
    new_first = source.first if left else source.first - 1
    body = (
        [f" {line}" for line in before]
        + [f"-{line}" for line in removed]
        + [f"+{line}" for line in new]
        + [f" {line}" for line in after]
    )
    # An absolute path stays as it is; `a/` and `b/` are for paths below the current folder.
    old_name, new_name = (path, path) if path.startswith("/") else (f"a/{path}", f"b/{path}")
    header = [
        f"--- {patch_name(old_name)}",
        f"+++ {patch_name(new_name)}",
        f"@@ -{source.first},{old} +{new_first},{left} @@",
    ]
    return "\n".join([*header, *body]) + "\n"


# Keywords of `torch.utils.checkpoint.checkpoint` itself; all others go to the function.
_CHECKPOINT_KEYWORDS = frozenset(
    {
        "context_fn",
        "debug",
        "determinism_check",
        "early_stop",
        "preserve_rng_state",
        "use_reentrant",
    }
)


def edited(source: Source, edits: Iterable[Edit]) -> list[str] | None:
    """The lines that take the statement's place, by the first edit that fits.

    An empty list deletes it. ``None`` where no edit fits, or where the statement shares its
    lines with others or belongs to an installed library: nothing is guessed.
    """
    if source.installed or not source.whole_lines:
        return None
    lines = source.text.split("\n")[source.begin - source.first : source.end - source.first + 1]
    # Numbers of lines that the text does not have, or an end of line that only Python counts.
    if not lines or any("\r" in line for line in lines):
        return None
    statement = _Statement(lines, source.alone)
    for edit in edits:
        new = statement.changed(edit)
        if new is not None:
            return new
    return None


def turned_off(source: Source, edits: Iterable[Edit]) -> list[str] | None:
    """The line of a configuration file with its setting off.

    ``None`` where the line does not have one setting of the mechanism that is switched on.
    """
    names = "|".join(re.escape(edit.name) for edit in edits if edit.name and edit.value == "False")
    (line,) = source.text.split("\n")[source.begin - source.first :][:1] or [""]
    entry = rf"""(?:^|[\s{{,.])["']?(?:{names})["']?\s*[:=]\s*["']?(\w+)(?![\w.])"""
    found = list(re.finditer(entry, line))
    off = opposite(found[0][1]) if len(found) == 1 else None
    if source.installed or not names or off is None:
        return None
    return [f"{line[: found[0].start(1)]}{off}{line[found[0].end(1) :]}"]


class _Statement:
    def __init__(self, lines: list[str], alone: bool) -> None:
        self._lines = [line.encode() for line in lines]
        self._indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
        self._alone = alone
        # A block around it makes an indented statement one that can be parsed alone.
        opening = "if 1:\n" if self._indent else ""
        self._offset = 2 if opening else 1
        try:
            tree = ast.parse(opening + "\n".join(lines))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            self._tree: ast.stmt | None = None
            return
        body = tree.body
        if opening and isinstance(body[0], ast.If):
            body = body[0].body
        self._tree = body[0] if len(body) == 1 else None

    def changed(self, edit: Edit) -> list[str] | None:
        if self._tree is None:
            return None
        calls = [node for node in ast.walk(self._tree) if isinstance(node, ast.Call)]
        if edit.how in ("keyword", "entry"):
            return self._with_value(edit, calls)
        named = [call for call in calls if _name(call) == edit.call]
        if len(named) != 1:
            return None
        (call,) = named
        whole = isinstance(self._tree, ast.Expr) and self._tree.value is call
        if edit.how == "delete":
            return ([f"{self._indent}pass"] if self._alone else []) if whole else None
        if whole or not call.args or any(isinstance(arg, ast.Starred) for arg in call.args[:1]):
            return None  # an unused result: a plain call has no effect to keep
        if edit.how == "unwrap":
            return self._replaced(call, self._text(call.args[0]))
        return self._replaced(call, self._plain_call(call))

    def _plain_call(self, call: ast.Call) -> str:
        function, *args = call.args
        text = self._text(function)
        if not isinstance(function, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
            text = f"({text})"
        kept = [word for word in call.keywords if word.arg not in _CHECKPOINT_KEYWORDS]
        words = [
            f"{w.arg}={self._text(w.value)}" if w.arg else f"**{self._text(w.value)}" for w in kept
        ]
        return f"{text}({', '.join([*map(self._text, args), *words])})"

    def _with_value(self, edit: Edit, calls: list[ast.Call]) -> list[str] | None:
        if edit.call != "*":
            calls = [call for call in calls if _name(call) == edit.call]
        values = [
            value
            for call in calls
            for value in (
                _entries(call, edit.name) if edit.how == "entry" else _keyword(call, edit.name)
            )
        ]
        if len(values) == 1:
            return self._replaced(values[0], edit.value)
        if values or not edit.add or len(calls) != 1:
            return None
        (call,) = calls
        inside = [*call.args, *(word.value for word in call.keywords)]
        if not inside or any(word.arg is None for word in call.keywords):
            return None
        last = max(inside, key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0))
        return self._replaced(last, f"{self._text(last)}, {edit.name}={edit.value}")

    def _text(self, node: ast.expr) -> str:
        first, begin, last, end = self._span(node)
        if first == last:
            return self._lines[first][begin:end].decode()
        middle = self._lines[first + 1 : last]
        return b"\n".join([self._lines[first][begin:], *middle, self._lines[last][:end]]).decode()

    def _replaced(self, node: ast.expr, text: str) -> list[str]:
        first, begin, last, end = self._span(node)
        joined = self._lines[first][:begin] + text.encode() + self._lines[last][end:]
        lines = [*self._lines[:first], *joined.split(b"\n"), *self._lines[last + 1 :]]
        return [line.decode() for line in lines]

    def _span(self, node: ast.expr) -> tuple[int, int, int, int]:
        """First line and byte, last line and byte, within the statement."""
        last = node.end_lineno or node.lineno
        end = node.end_col_offset or node.col_offset
        return node.lineno - self._offset, node.col_offset, last - self._offset, end


def _name(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _keyword(call: ast.Call, name: str) -> list[ast.expr]:
    return [word.value for word in call.keywords if word.arg == name]


def _entries(call: ast.Call, name: str) -> list[ast.expr]:
    return [
        value
        for word in call.keywords
        if isinstance(word.value, ast.Dict)
        for key, value in zip(word.value.keys, word.value.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == name
    ]
