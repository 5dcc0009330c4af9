"""The version of transformers that is pinned beside a file, or installed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from recompute_scan.files import opened
from recompute_scan.frameworks.configuration import Variant
from recompute_scan.lint.said import Pinned

# A requirement of transformers, up to its end, a marker, a comment or an option of pip's.
_PINNED = re.compile(
    r"^[^\S\n]*[\"']{0,3}transformers[^\S\n]*(?:\[[^\]\n]{0,200}\][^\S\n]*)?"
    r"([=~<>!][^\"'#;\n\\]{0,200})",
    re.MULTILINE,
)
_LARGE = 256_000
_NON_REENTRANT = "5.0"
_REFUSES = "4.33"
# On either side of those two.
_TRIED = ("4.0", "4.32.99", _REFUSES, "4.99.99", _NON_REENTRANT, "99.0")


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
    pins = [found[1].split(" --")[0] for text in _texts(folder) for found in _PINNED.finditer(text)]
    source = "as pinned beside it"
    if not pins and installed is not None:
        pins, source = [f"=={installed}"], f"transformers {installed} being installed"
    defaults: set[Variant] = set()
    refusing: set[bool] = set()
    for pin in pins:
        allowed = list(_allowed(pin))
        older, refuses = (
            {Version(each) < Version(since) for each in allowed}
            for since in (_NON_REENTRANT, _REFUSES)
        )
        if len(older) == 1:
            defaults.add("reentrant" if older.pop() else "non-reentrant")
        if len(refuses) == 1:
            refusing.add(not refuses.pop())
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


def _allowed(pin: str) -> Iterator[str]:
    """Of the versions tried, and those that the pin names, the ones that it allows."""
    try:
        specifiers = SpecifierSet(pin)
        named = [one.version.removesuffix(".*") for one in specifiers]
        for each in (*_TRIED, *named, *(f"{Version(one).base_version}.1" for one in named)):
            if specifiers.contains(each, prereleases=True):
                yield Version(each).base_version
    except ValueError:  # no requirement after all
        return
