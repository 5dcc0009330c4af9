"""Every regular expression of the package takes a time that grows with its text, and no faster.

The expressions are found in the sources: every call of `re.compile` and of `re`'s other functions.
Their texts are made from the expression itself: its literals and members of its classes, and what
it repeats, again and again, after what comes before that in it, with an end that does not fit.
"""

from __future__ import annotations

import ast
import importlib
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import recompute_scan

try:
    from re import _constants as codes  # type: ignore[attr-defined]
    from re import _parser as parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_constants as codes
    import sre_parse as parser

ROOT = Path(recompute_scan.__file__).parent
METHODS = {"match", "search", "fullmatch", "sub", "subn", "split", "findall", "finditer"}
# Modules whose expressions are handed on and matched from the beginning of a text.
HANDED_ON = {
    "recompute_scan.recompute.vocabulary": "match",
    "recompute_scan.compiled.logs": "match",
    "recompute_scan.frameworks.registry": "fullmatch",
}
_CALL = re.compile(r"\b(\w{1,60})\.(\w{1,10})\(")
SMALL, LARGE = 10_000, 40_000
# Seconds of the processor. Below the first, growth is not looked at: no square fits into it.
UNSEEN, SLOW, GROWS = 0.01, 0.3, 9
# No expression here takes a line break and a NUL as well, unless by a class of what it leaves out.
END = "\n\x00"
# Each is little larger than the one before: what grows fast is stopped early.
_SHORT = (24, 32, 36, 40, 100, 200, 300, 500, 800, 1_200, 1_800, 2_700, 4_000)
_MOST_TEXTS = 48
_LONG_REPEAT = 300


@dataclass(frozen=True)
class Found:
    """An expression, where it stands, and how it is used."""

    where: str
    pattern: re.Pattern[Any]
    methods: tuple[str, ...]


class _Unknown(str):
    """Stands for a value that only a call has; whatever it is asked for is itself."""

    __slots__ = ()

    def __getattr__(self, name: str) -> _Unknown:
        return self


def _module(path: Path) -> str:
    dotted = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    return dotted.removesuffix(".__init__")


def _evaluated(node: ast.expr, names: dict[str, Any]) -> Any:
    code = compile(ast.fix_missing_locations(ast.Expression(node)), "pattern", "eval")
    while True:
        try:
            return eval(code, names)
        except NameError as unknown:
            names[str(unknown.name)] = _Unknown("ab_c")


def _used(name: str, path: Path, calls: dict[Path, dict[str, set[str]]]) -> set[str]:
    """The methods that are called on this name, in its module, and elsewhere if it is public."""
    readers = [path] if name.startswith("_") else calls
    return {method for one in readers for method in calls[one].get(name, ())}


def _methods(
    call: ast.Call,
    parents: dict[ast.AST, ast.AST],
    path: Path,
    calls: dict[Path, dict[str, set[str]]],
) -> set[str]:
    assert isinstance(call.func, ast.Attribute)
    parent = parents.get(call)
    if call.func.attr != "compile":
        return {call.func.attr}
    if isinstance(parent, ast.Attribute):
        return {parent.attr} & METHODS
    at = parent.elts.index(call) if isinstance(parent, ast.Tuple) else None
    parent = parents.get(parent) if isinstance(parent, ast.Tuple) else parent
    target = parent.targets[0] if isinstance(parent, ast.Assign) else None
    target = parent.target if isinstance(parent, ast.AnnAssign) else target
    if at is not None and isinstance(target, ast.Tuple):
        target = target.elts[at]
    used = _used(target.id, path, calls) if isinstance(target, ast.Name) else set()
    return used or {HANDED_ON.get(_module(path), "search")}


def expressions() -> Iterator[Found]:
    """Those of the whole package."""
    sources = {path: path.read_text("utf-8") for path in sorted(ROOT.rglob("*.py"))}
    calls: dict[Path, dict[str, set[str]]] = {path: {} for path in sources}
    for path, text in sources.items():
        for name, method in _CALL.findall(text):
            if method in METHODS:
                calls[path].setdefault(name, set()).add(method)
    for path, text in sources.items():
        if "re." not in text:
            continue
        tree = ast.parse(text)
        parents = {child: one for one in ast.walk(tree) for child in ast.iter_child_nodes(one)}
        for node in ast.walk(tree):
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "re"
                and node.func.attr in {*METHODS, "compile"}
            ):
                continue
            names = dict(vars(importlib.import_module(_module(path))))
            given = node.args[: 2 if node.func.attr == "compile" else 1]
            arguments = [_evaluated(one, names) for one in given]
            flags = [one.value for one in node.keywords if one.arg == "flags"]
            arguments += [_evaluated(one, names) for one in flags]
            methods = _methods(node, parents, path, calls)
            where = f"{_module(path)}:{node.lineno}"
            yield Found(where, re.compile(*arguments), tuple(sorted(methods)))


FOUND = list(expressions())
CLASSES = {
    codes.CATEGORY_DIGIT: r"\d",
    codes.CATEGORY_NOT_DIGIT: r"\D",
    codes.CATEGORY_SPACE: r"\s",
    codes.CATEGORY_NOT_SPACE: r"\S",
    codes.CATEGORY_WORD: r"\w",
    codes.CATEGORY_NOT_WORD: r"\W",
}
CHARACTERS = "a1 _A.-/\\\"'`:;,=()[]{}<>#$%&*+?!@^~|\t\n\x1bé│"
REPEATS = {codes.MAX_REPEAT, codes.MIN_REPEAT}


def _in_class(items: Iterable[tuple[Any, Any]], char: str) -> bool:
    for kind, value in items:
        if kind is codes.LITERAL and ord(char) == value:
            return True
        if kind is codes.RANGE and value[0] <= ord(char) <= value[1]:
            return True
        if kind is codes.CATEGORY and re.match(CLASSES[value], char):
            return True
    return False


def _members(kind: Any, value: Any) -> list[str]:
    """A few characters that one atom takes."""
    if kind is codes.LITERAL:
        return [chr(value)]
    if kind is codes.NOT_LITERAL:
        return [char for char in CHARACTERS if ord(char) != value][:3]
    if kind is codes.ANY:
        return ["a", " ", "_"]
    if kind is not codes.IN:
        return []
    negated = bool(value) and value[0][0] is codes.NEGATE
    items = value[1:] if negated else value
    single = [chr(one) for what, one in items if what is codes.LITERAL]
    fitting = [char for char in CHARACTERS if _in_class(items, char) is not negated]
    return list(dict.fromkeys([*([] if negated else single), *fitting]))[:4]


def _samples(parsed: Iterable[tuple[Any, Any]], most: int = 4) -> list[str]:
    """Short texts that the expression takes, or nearly."""
    made = [""]
    for kind, value in parsed:
        if kind is codes.SUBPATTERN:
            options = _samples(value[-1], most)
        elif kind is codes.BRANCH:
            options = [one for branch in value[1] for one in _samples(branch, 2)]
        elif kind in REPEATS:
            least = value[0] if isinstance(value[0], int) else 0
            options = [one * min(max(least, 1), 20) for one in _samples(value[2], 2)]
            options += [""] if not least else []
        else:
            options = _members(kind, value)[:3] or [""]
        made = [text + option for option in options for text in made][:most]
    return made


def _repeated(
    parsed: Iterable[tuple[Any, Any]], before: str, pairs: dict[tuple[str, str], None]
) -> None:
    """What comes again and again in each long repetition, and what stands before it."""
    items = list(parsed)
    for at, (kind, value) in enumerate(items):
        if kind in REPEATS:
            least, most, body = value
            if most is codes.MAXREPEAT or most >= _LONG_REPEAT:
                after = _samples(items[at + 1 : at + 3], 1)[0]
                for unit in _samples(body, 4):
                    pairs[before, unit] = None
                    pairs[before, unit + after] = None
                pairs[before, after] = None
            _repeated(body, before, pairs)
            before += _samples(body, 1)[0] * min(least, 20)
        elif kind is codes.SUBPATTERN:
            _repeated(value[-1], before, pairs)
            before += _samples(value[-1], 1)[0]
        elif kind is codes.BRANCH:
            for branch in value[1]:
                _repeated(branch, before, pairs)
            before += _samples(value[1][0], 1)[0]
        elif kind in {codes.ASSERT, codes.ASSERT_NOT}:
            _repeated(value[1], before, pairs)
        else:
            before += _samples([(kind, value)], 1)[0]


def _atoms(parsed: Iterable[tuple[Any, Any]], found: dict[str, None]) -> None:
    for kind, value in parsed:
        if kind is codes.SUBPATTERN:
            _atoms(value[-1], found)
        elif kind is codes.BRANCH:
            for branch in value[1]:
                _atoms(branch, found)
        elif kind in REPEATS:
            _atoms(value[2], found)
        elif kind in {codes.ASSERT, codes.ASSERT_NOT}:
            _atoms(value[1], found)
        else:
            found.update(dict.fromkeys(_members(kind, value)[:2]))


def texts(pattern: re.Pattern[Any]) -> list[tuple[str, str]]:
    """A beginning, and what comes after it as often as it fits."""
    parsed = parser.parse(pattern.pattern, pattern.flags)
    pairs: dict[tuple[str, str], None] = {}
    _repeated(parsed, "", pairs)
    # Each beginning is a place from which a search may start.
    starts = {("", before + unit): None for before, unit in pairs if before}
    starts |= {("", before): None for before, _ in pairs if before}
    atoms: dict[str, None] = {}
    _atoms(parsed, atoms)
    whole = _samples(parsed, 2)
    singles = [*pairs, *starts, *(("", one) for one in (*whole, *atoms))]
    return [pair for pair in dict.fromkeys(singles) if pair[1]][:_MOST_TEXTS]


def seconds(pattern: re.Pattern[Any], method: str, text: str) -> float:
    """How long the processor works on this text."""
    given: Any = text.encode("utf-8", "replace") if isinstance(pattern.pattern, bytes) else text
    call = getattr(pattern, method)
    began = time.process_time()
    if method in ("sub", "subn"):
        call(given[:0], given)
    else:
        found = call(given)
        if method == "finditer":
            for _ in found:
                pass
    return time.process_time() - began


def trouble(pattern: re.Pattern[Any], methods: Iterable[str]) -> str | None:
    """What takes too long, or grows too fast."""
    for before, unit in texts(pattern):

        def text(size: int, before: str = before, unit: str = unit) -> str:
            return before + unit * ((size - len(before)) // len(unit) + 1) + END

        for method in methods:
            said = f"{method}({before!r} + {unit!r} * n)"
            for size in _SHORT:
                if (taken := seconds(pattern, method, text(size))) > SLOW:
                    return f"{said}: {taken:.2f} s for {size} characters"
            small = seconds(pattern, method, text(SMALL))
            if small < UNSEEN:
                continue
            if small > SLOW:
                return f"{said}: {small:.2f} s for {SMALL:,} characters"
            small = min(small, seconds(pattern, method, text(SMALL)))
            large = min(seconds(pattern, method, text(LARGE)) for _ in range(2))
            if large > SLOW or (small >= UNSEEN and large > GROWS * small):
                return f"{said}: {small:.3f} s, and {large:.2f} s for {LARGE:,} characters"
    return None


@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        (r"^\s*[│|] ?(?P<inner>.*?)\s*[│|]?\s*$", "match"),
        (r"(\w+)(?:\(ms\))?=(\w+)", "findall"),
        (r"\x1b\][^\x07]*\x07", "sub"),
        (r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*Error:", "search"),
        (r"(?:a|aa)+$", "match"),
        (r"\[([^\]\s]*\.py)\]", "sub"),
    ],
)
def test_an_expression_that_backtracks_is_seen(pattern: str, method: str) -> None:
    assert trouble(re.compile(pattern), [method]) is not None


def test_those_of_every_module_are_found() -> None:
    modules = {one.where.partition(":")[0] for one in FOUND}
    assert len(FOUND) > 300
    assert {"recompute_scan.diagnose.tracebacks", "recompute_scan.lint.library_calls"} <= modules


@pytest.mark.parametrize("module", sorted({one.where.partition(":")[0] for one in FOUND}))
def test_its_expressions_take_a_time_that_grows_with_the_text(module: str) -> None:
    mine = [one for one in FOUND if one.where.partition(":")[0] == module]
    slow = {one.where: said for one in mine if (said := trouble(one.pattern, one.methods))}
    assert not slow
