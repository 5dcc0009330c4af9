"""Looks for anything of recompute-scan's that hangs on other people's code, wherever that may be.

Knows nothing of what recording replaces: it walks every module and class of the process.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import recompute_scan

OURS = str(Path(recompute_scan.__file__).parent)
# wrapt cannot be told to wait no longer for an import.
WAITING = "wrapt.importer._post_import_hooks"
_MINE = ("recompute_scan", "benchmarks", "tests", "_pytest", "conftest", "__main__")


def left_behind() -> set[str]:
    """Names under which others hold a function of ours: attributes, and entries of containers."""
    found = set()
    for _, name, value in _attributes():
        if name != WAITING and any(_is_ours(code) for code in _codes(value, 2)):
            found.add(name)
    return found


def snapshot() -> dict[tuple[int, str], Any]:
    """Every function in a module or a class of somebody else's, by where it hangs."""
    kinds = (FunctionType, staticmethod, classmethod, property)
    return {
        (owner, name): value
        for owner, name, value in _attributes()
        if issubclass(type(value), kinds)
    }


def frames_of_ours(run: Callable[[], object]) -> list[str]:
    """Functions of ours that are entered while ``run`` runs."""
    entered = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and _is_ours(frame.f_code):
            entered.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return entered


def _attributes() -> Iterator[tuple[int, str, Any]]:
    for module in list(sys.modules.values()):
        if type(module) is ModuleType and not _is_mine(module.__name__):
            for name, value in list(vars(module).items()):
                yield id(module), f"{module.__name__}.{name}", value
    for kind in _classes():
        home = vars(kind).get("__module__")
        if isinstance(home, str) and not _is_mine(home):
            for name, value in list(vars(kind).items()):
                yield id(kind), f"{home}.{kind.__qualname__}.{name}", value


def _classes() -> list[type]:
    """Every class of the process, without a question to one that could answer by its own code."""
    found, waiting = {id(object): object}, [object]
    while waiting:
        fresh = {id(kind): kind for kind in type.__subclasses__(waiting.pop())}
        waiting += [kind for number, kind in fresh.items() if number not in found]
        found |= fresh
    return list(found.values())


def _is_mine(module: str) -> bool:
    return module.partition(".")[0] in _MINE


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(OURS)


def _codes(value: Any, depth: int) -> Iterator[CodeType]:
    kind = type(value)
    if kind is FunctionType:
        yield value.__code__
    elif kind is MethodType or kind in (staticmethod, classmethod):
        yield from _codes(value.__func__, depth)
    elif kind is functools.partial:
        yield from _codes(value.func, depth)
    elif depth and issubclass(kind, (list, tuple, set)):
        for item in list(value):
            yield from _codes(item, depth - 1)
    elif depth and issubclass(kind, dict):
        for item in list(dict.values(value)):
            yield from _codes(item, depth - 1)
