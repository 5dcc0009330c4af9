"""The version of transformers that is pinned beside a file."""

from __future__ import annotations

import re
from pathlib import Path

from recompute_scan.lint.said import Pinned, Variant

_PINNED = re.compile(
    r"^[\s\"']*transformers\s*(?:\[[^\]]*\])?\s*(==|~=|<=|<|>=)\s*(\d+)(?:\.(\d+))?", re.MULTILINE
)
_LARGE = 256_000
_NON_REENTRANT = (5, 0)
_REFUSES = (4, 33)


def pinned_beside(folder: Path) -> Pinned:
    """What ``requirements*.txt`` and ``pyproject.toml`` of the folder pin; the last known if none.

    Files that contradict each other pin nothing.
    """
    defaults: set[Variant] = set()
    refusing: set[bool] = set()
    for file in (*sorted(folder.glob("requirements*.txt")), folder / "pyproject.toml"):
        try:
            with file.open("rb") as stream:
                text = stream.read(_LARGE).decode(errors="replace")
        except OSError:
            continue
        for sign, major, minor in _PINNED.findall(text):
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
    return Pinned(
        default=defaults.pop() if len(defaults) == 1 else "default",
        refuses=False not in refusing,
    )


def _below(sign: str, number: tuple[int, int], bound: tuple[int, int]) -> bool:
    return number <= bound if sign == "<" else number < bound
