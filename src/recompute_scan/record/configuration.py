"""Where a setting was given: in the code, on the command line, in a file, or by default.

A frame's variables are looked at so that nothing of the script's changes. Before Python 3.13 a
function's frame has one dictionary for its variables, filled anew at each look (PEP 667): whoever
called ``locals()`` there holds the same one, and what it shows stays alive.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from types import FrameType

from msgspec import Struct, field

from recompute_scan.files import content
from recompute_scan.result.run_record import source_lines

# A function whose code names one of these may hold that dictionary.
_HOLDERS = frozenset({"locals", "vars", "f_locals"})


def variables(frame: FrameType) -> dict[str, object]:
    """The frame's variables by name; none where a look could be noticed."""
    if sys.version_info >= (3, 13) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return dict(frame.f_locals)
    if frame.f_trace is not None or not _HOLDERS.isdisjoint(frame.f_code.co_names):
        return {}
    found = frame.f_locals
    shown = dict(found)
    found.clear()
    return shown


_OFF = frozenset({"false", "0", "no", "off", "none", "null"})
_CONFIGURATIONS = frozenset({".cfg", ".conf", ".ini", ".json", ".toml", ".yaml", ".yml"})
_MOST_BYTES = 1_000_000


class Made(Struct, frozen=True, eq=False):
    """A settings object at the moment when it was made.

    Attributes:
        site: The line that made it, ``file:line``.
        kind: Its class.
        arguments: The program's arguments then.
        environment: The environment then.
    """

    site: str
    kind: type
    arguments: tuple[str, ...] = field(default_factory=lambda: tuple(sys.argv[1:]))
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


class SourceLine(Struct, frozen=True):
    """A line of a file."""

    file: str
    number: int


def given_at(
    made: Made, names: Collection[str], variables: Collection[str], statement: str | None
) -> str | SourceLine | None:
    """Where the setting has its value from; ``None`` for the statement that made the object.

    An option of the command line is given as it was written there, without its value; a variable
    of the environment by its name.

    Args:
        made: The object that holds it.
        names: What the setting is called.
        variables: Variables of the environment that set it too.
        statement: Source of the statement that made the object, where it is known.
    """
    spelled = _spelled(statement, names) if statement else None
    if spelled is not None:
        return _option(made.arguments, spelled)  # the line itself where the value is from nowhere
    return (
        _option(made.arguments, names)
        or _in_files(made.arguments, names)
        or _default(made.kind, names)
        or next((name for name in variables if _is_on(made.environment.get(name))), None)
    )


def _spelled(statement: str, names: Collection[str]) -> set[str] | None:
    """What the value is made of, where the statement has the setting; ``None`` where it has not."""
    try:
        tree = ast.parse(dedent(statement))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in ast.walk(tree):
        values: list[ast.expr] = []
        if isinstance(node, ast.keyword) and node.arg in names:
            values = [node.value]
        elif isinstance(node, ast.Dict):
            keys = zip(node.keys, node.values, strict=True)
            values = [v for key, v in keys if isinstance(key, ast.Constant) and key.value in names]
        if values:
            return set(_identifiers(values[0]))
    return None


def _identifiers(value: ast.expr) -> Iterator[str]:
    """Names that may be those of options: ``a.b["c"]`` is the option ``c``."""
    if isinstance(value, ast.Name):
        yield value.id
    elif isinstance(value, ast.Attribute):
        yield value.attr
    elif isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant):
        yield str(value.slice.value)
    else:
        for child in ast.iter_child_nodes(value):
            if isinstance(child, ast.expr):
                yield from _identifiers(child)


def _option(arguments: Sequence[str], names: Collection[str]) -> str | None:
    """The argument that sets one of these: ``--a-b``, ``--x.a_b=1``, ``x.a_b=true``; the last."""
    found = None
    for place, argument in enumerate(arguments):
        option, equals, value = argument.lstrip("+").partition("=")
        if not (equals or option.startswith("-")):
            continue
        name = option.lstrip("-").rpartition(".")[2].replace("-", "_")
        if name in names:
            following = arguments[place + 1] if not equals and place + 1 < len(arguments) else value
            found = option if following.lower() not in _OFF else None
    return found


def _in_files(arguments: Sequence[str], names: Collection[str]) -> SourceLine | None:
    """The line of a configuration file named on the command line that has one of these."""
    words = "|".join(map(re.escape, names))
    entry = re.compile(rf"""(?:^|[\s{{,])["']?(?:{words})["']?\s*[:=]\s*["']?(?P<value>\w+)""")
    for argument in arguments:
        path = Path(argument.rpartition("=")[2])
        try:
            if path.suffix not in _CONFIGURATIONS:
                continue
            lines = source_lines(content(path, _MOST_BYTES).decode(errors="replace"))
        except (OSError, ValueError):
            continue
        for number, line in enumerate(lines, 1):
            found = entry.search(line)
            if found and not line.lstrip().startswith(("#", "//")) and _is_on(found["value"]):
                return SourceLine(str(path.absolute()), number)
    return None


def _default(kind: type, names: Collection[str]) -> SourceLine | None:
    """The line of a class, derived from the settings' own, that sets another default."""
    for base in kind.__mro__[:-1]:
        if not names & vars(base).keys():
            continue
        file = getattr(sys.modules.get(base.__module__), "__file__", None)
        try:
            tree = ast.parse(content(Path(file or "")))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == base.__name__:
                for line in node.body:
                    target = line.target if isinstance(line, ast.AnnAssign) else None
                    if isinstance(target, ast.Name) and target.id in names:
                        return SourceLine(str(file), line.lineno)
        return None
    return None


def _is_on(value: str | None) -> bool:
    return bool(value) and str(value).lower() not in _OFF
