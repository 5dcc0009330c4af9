"""Which line of the user's code is behind a call: the ``file:line`` shown to a person."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType

import torch

from recompute_scan.record.statements import statement_at
from recompute_scan.run_info import Source

# Packages that switch checkpointing on for somebody else; never "the user's code", wherever
# they are installed.
_FRAMEWORKS = frozenset(
    {
        "accelerate",
        "axolotl",
        "composer",
        "deepspeed",
        "diffusers",
        "fairscale",
        "lightning",
        "lightning_fabric",
        "llamafactory",
        "megatron",
        "nemo",
        "nemo_automodel",
        "peft",
        "pytorch_lightning",
        "recompute_scan",
        "sentence_transformers",
        "timm",
        "torch",
        "torchtitan",
        "torchtune",
        "transformer_engine",
        "transformers",
        "trl",
        "unsloth",
        "unsloth_zoo",
        "wrapt",
    }
)
# How IPython names cells at a terminal; in Jupyter they have names of files.
_IPYTHON = "<ipython-input-"
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_SKIPPED = tuple(
    {str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[1]) + os.sep}
    | {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")}  # noqa: PTH118
)


class CallSites:
    """Turns frames into sites, and remembers where each one is."""

    def __init__(self, start_folder: Path) -> None:
        self._start = start_folder
        self._places: dict[str, tuple[Path, int]] = {}
        # The same lines are asked for in every step, and paths are slow.
        self._sites: dict[tuple[str, int], str] = {}

    def sources(self) -> dict[str, Source]:
        """The statement at each site that was named, where its source can be read."""
        found = {site: statement_at(path, line) for site, (path, line) in self._places.items()}
        return {
            site: replace(source, installed=_in_library(str(self._places[site][0])))
            for site, source in found.items()
            if source is not None
        }

    def switched_on_at(self, frame: FrameType | None) -> str:
        """The nearest user line that led to this frame, for calls that switch a setting on.

        Where no user code is on the stack, the outermost line of a library other than torch;
        empty where there is none either.
        """
        outermost: FrameType | None = None
        while frame is not None:
            if is_user_code(frame):
                return self._site(frame)
            if _is_library(frame):
                outermost = frame
            frame = frame.f_back
        return self._site(outermost) if outermost is not None else ""

    def called_at(self, frame: FrameType | None) -> str:
        """The line outside torch and this package that made a call, the user's or a library's."""
        while frame is not None:
            if is_user_code(frame) or _is_library(frame):
                return self._site(frame)
            frame = frame.f_back
        return ""

    def _site(self, frame: FrameType) -> str:
        file, line = frame.f_code.co_filename, frame.f_lineno
        site = self._sites.get((file, line))
        if site is None:
            cell = _cell(file)
            site = f"{cell or self._shown(file)}:{line}"
            self._sites[file, line] = site
            self._places.setdefault(site, (Path(file) if cell else self._start / file, line))
        return site

    def _shown(self, file: str) -> str:
        for marker in _INSTALLED:
            if marker in file:
                return file.rpartition(marker)[2]
        path = Path(os.path.normpath(self._start / file))
        return str(path.relative_to(self._start)) if path.is_relative_to(self._start) else str(path)


def is_user_code(frame: FrameType) -> bool:
    """Whether this is a line of the person who runs the script, not of anything installed."""
    return not _is_generated(frame) and not _is_installed(frame)


@cache
def is_library(module: str, file: str) -> bool:
    """Whether code of this module and file is Python's, torch's or another library's."""
    installed = file.startswith(_SKIPPED) or _in_library(file)
    return installed or module.partition(".")[0] in _FRAMEWORKS


def place_of(frame: FrameType) -> str:
    """``path:function`` of the frame's code, the path as below ``site-packages``."""
    name = str(frame.f_globals.get("__name__") or "")
    return f"{_path(name, frame.f_code.co_filename)}:{frame.f_code.co_name}"


def places_of(frame: FrameType | None) -> Iterator[str]:
    """Places of this frame and all above it, innermost first.

    A method has a second place where its object's class is defined elsewhere: a trainer of one
    library is often a subclass of another's.
    """
    while frame is not None:
        place = place_of(frame)
        yield place
        owner = type(frame.f_locals.get("self"))
        other = f"{owner.__module__.replace('.', '/')}.py:{frame.f_code.co_name}"
        if owner is not type(None) and other != place:
            yield other
        frame = frame.f_back


def top_package(frame: FrameType) -> str:
    """Name of the package that the frame's code belongs to."""
    return str(frame.f_globals.get("__name__") or "").partition(".")[0]


@cache
def _path(module: str, file: str) -> str:
    """Where the module's file is below the folder that it is imported from."""
    path = file.replace(os.sep, "/")
    below = module.replace(".", "/")
    for ending in (f"{below}.py", f"{below}/__init__.py"):
        if module and path.endswith(f"/{ending}"):
            return ending
    return path


def _in_library(file: str) -> bool:
    return any(marker in file for marker in _INSTALLED)


def _cell(file: str) -> str | None:
    """``In[3]`` for what IPython or Jupyter compiled from a cell; ``None`` for a file."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or Path(file).is_file():
        return None
    try:
        found = shell.compile.format_code_name(file)  # what its tracebacks say
    except AttributeError:  # before IPython 7.27
        return None
    return str(found[1]) if found else None


def _is_generated(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith("<") and not file.startswith(_IPYTHON)


def _is_installed(frame: FrameType) -> bool:
    return is_library(top_package(frame), frame.f_code.co_filename)


def _is_library(frame: FrameType) -> bool:
    if _is_generated(frame) or top_package(frame) in ("torch", "recompute_scan"):
        return False
    file = frame.f_code.co_filename
    return _in_library(file) or top_package(frame) in _FRAMEWORKS
