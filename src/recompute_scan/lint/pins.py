"""The version of transformers that is pinned beside a file, or installed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from recompute_scan.files import opened
from recompute_scan.frameworks.configuration import Variant
from recompute_scan.lint.said import Pinned

_PINNED = re.compile(
    r"^[^\S\n]*[\"']{0,3}transformers\s*(?:\[[^\]]*\]\s*)?(==|~=|<=|<|>=)\s*(\d+)(?:\.(\d+))?",
    re.MULTILINE,
)
_NUMBER = re.compile(r"(\d+)(?:\.(\d+))?")
_LARGE = 256_000
_NON_REENTRANT = (5, 0)
_REFUSES = (4, 33)


def installed_version() -> str | None:
    """The version of transformers that is installed beside this tool; nothing is imported."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


def pinned_beside(folder: Path, installed: str | None = None) -> Pinned:
    """What ``requirements*.txt`` and ``pyproject.toml`` of the folder pin; where they name no
    version of transformers, the one installed, and the last known where there is none.

    Files that contradict each other pin nothing.
    """
    pins = [pin for text in _texts(folder) for pin in _PINNED.findall(text)]
    source = "as pinned beside it"
    if not pins and installed is not None and (found := _NUMBER.match(installed)):
        pins, source = [("==", *found.groups(""))], f"transformers {installed} being installed"
    defaults: set[Variant] = set()
    refusing: set[bool] = set()
    for sign, major, minor in pins:
        number = (int(major[:4]), int(minor[:4] or 0))
        exact, least = sign in ("==", "~="), sign in ("==", "~=", ">=")
        if least and number >= _NON_REENTRANT:
            defaults.add("non-reentrant")
        elif sign != ">=" and _below(sign, number, _NON_REENTRANT):
            defaults.add("reentrant")
        if sign != ">=" and _below(sign, number, _REFUSES):
            refusing.add(False)
        elif exact or (least and number >= _REFUSES):
            refusing.add(True)
    known = len(defaults) == 1
    return Pinned(
        default=defaults.pop() if known else "default",
        refuses=False not in refusing,
        source=source if known else "",
    )


def _texts(folder: Path) -> Iterator[str]:
    for file in (*sorted(folder.glob("requirements*.txt")), folder / "pyproject.toml"):
        try:
            with opened(file) as stream:
                yield stream.read(_LARGE).decode(errors="replace")
        except OSError:
            continue


def _below(sign: str, number: tuple[int, int], bound: tuple[int, int]) -> bool:
    return number <= bound if sign == "<" else number < bound
