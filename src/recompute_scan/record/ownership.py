"""Whose code a frame runs: the user's own, another project's within it, a library's, or nobody's.

Where a file lies says most of it. What lies under ``site-packages``, or in any folder to which pip
installed something, is a library's, but for the package that the program itself was started from:
who installs a project and runs ``python -m project.train`` wrote that project. What lies elsewhere
is the user's, but for copies of other projects that are kept in the tree.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType

import torch

from recompute_scan.frameworks.known import framework_files

# How IPython names cells at a terminal; in Jupyter they have names of files.
_IPYTHON = "<ipython-input-"
_SITE_FOLDERS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_NOBODYS = tuple(
    str(Path(path).parent) + os.sep for path in (torch.__file__, Path(__file__).parent)
)
_PYTHONS = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")}  # noqa: PTH118
)
# Where projects keep copies of others.
_COPIES = frozenset(
    {"_vendor", "extern", "external", "externals", "submodules", "third_party", "thirdparty"}
    | {"3rdparty", "vendor", "vendored"}
)


class Owner(IntEnum):
    """Whose code it is; of several frames on a stack, one of the highest is shown."""

    NOBODY = 0
    LIBRARY = 1
    COPY = 2
    USER = 3


class Ownership:
    """Tells whose code a frame runs, and remembers it by file.

    Args:
        start: The folder that the program was started in.
    """

    def __init__(self, start: Path) -> None:
        self._start = start
        self._known: dict[tuple[str, str], Owner] = {}
        self._main: object = None

    def of(self, frame: FrameType) -> Owner:
        """Whose code this frame runs."""
        main = sys.modules.get("__main__")
        if main is not self._main:  # the program has begun since
            self._main = main
            self._known.clear()
        key = str(frame.f_globals.get("__name__") or ""), frame.f_code.co_filename
        owner = self._known.get(key)
        if owner is None:
            owner = self._known[key] = _owner(*key, main, self._start)
        return owner


def is_library(module: str, file: str) -> bool:
    """Whether code of this module and file is Python's, torch's or another library's."""
    owner = _owner(module, file, sys.modules.get("__main__"), Path.cwd())
    return owner < Owner.COPY or _is_framework(module.partition(".")[0], file)


def _owner(module: str, file: str, main: object, start: Path) -> Owner:
    if file.startswith("<") and not file.startswith(_IPYTHON):
        return Owner.NOBODY
    if file.startswith(_NOBODYS):
        return Owner.NOBODY
    package = module.partition(".")[0]
    if site_folder(file) is not None:
        own = _programs_package(main)
        return Owner.USER if own and package in (own, "__main__") else Owner.LIBRARY
    if file.startswith(_PYTHONS):
        return Owner.NOBODY
    if file == getattr(main, "__file__", None) and _installed_starter(main):
        return Owner.NOBODY
    if _is_framework(package, file) or _is_copy(start / file, start):
        return Owner.COPY
    return Owner.USER


def site_folder(file: str) -> str | None:
    """The folder into which pip installed this file; ``None`` for a file that it did not."""
    for marker in _SITE_FOLDERS:
        if marker in file:
            return file[: file.rindex(marker) + len(marker)]
    return _target_folder(Path(file))


@cache
def _target_folder(file: Path) -> str | None:
    """The folder around this file that pip was given as a ``--target``, with this file in it."""
    for folder in file.parents if file.is_absolute() else ():
        if file.relative_to(folder).parts[0] in _installed_in(folder):
            return os.path.join(folder, "")  # noqa: PTH118 - with a separator at its end
    return None


@cache
def _installed_in(folder: Path) -> frozenset[str]:
    """First parts of the paths that pip installed in this very folder.

    A distribution's ``RECORD`` lists its files
    (https://packaging.python.org/en/latest/specifications/recording-installed-packages/).
    """
    found = set()
    with suppress(OSError):
        for notes in folder.glob("*.dist-info"):
            found.add(notes.name.partition("-")[0])
            with suppress(OSError):
                lines = (notes / "RECORD").read_text("utf-8", "replace").splitlines()
                found |= {line.partition(",")[0].partition("/")[0] for line in lines}
    return frozenset(found)


@cache
def _is_framework(package: str, file: str) -> bool:
    """Is the file a framework's, as the files beside it say, wherever it is kept?"""
    files = framework_files(package)
    root, found, _ = file.rpartition(f"{os.sep}{package}{os.sep}")
    return bool(found) and any(Path(root, path).exists() for path in files)


@cache
def _is_copy(file: Path, start: Path) -> bool:
    """Is the file part of another project that is kept inside the user's tree?"""
    inner = file.relative_to(start).parts[:-1] if file.is_relative_to(start) else ()
    if _COPIES.intersection(inner):
        return True
    return any(Path(start, *inner[:depth], ".git").exists() for depth in range(1, len(inner) + 1))


def _programs_package(main: object) -> str:
    """The package that the program was started from; empty where it is a plain script."""
    spec = getattr(main, "__spec__", None)
    package = str(spec.name).partition(".")[0] if spec is not None else _installed_starter(main)
    return "" if framework_files(package) else package


def _installed_starter(main: object) -> str:
    """The package of a command that pip installed, if this program is one; else empty.

    Such a script lies in a folder of programs and calls a function of a package that is installed
    for the same Python.
    """
    file = getattr(main, "__file__", None)
    if not isinstance(main, ModuleType) or not file:
        return ""
    folder = Path(file).absolute().parent
    if folder.name not in ("bin", "Scripts"):
        return ""
    for module, where in _called(main):
        if site_folder(where) is not None and Path(where).is_relative_to(folder.parent):
            return module.partition(".")[0]
    return ""


def _called(main: ModuleType) -> Iterator[tuple[str, str]]:
    """Modules, with their files, of the functions that a program has imported."""
    for value in list(vars(main).values()):
        module = getattr(value, "__module__", None) if callable(value) else None
        file = getattr(sys.modules.get(module), "__file__", None) if module else None
        if module and file:
            yield str(module), str(file)
