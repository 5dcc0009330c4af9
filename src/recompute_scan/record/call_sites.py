"""Which line of the user's code is behind a call, the ``file:line`` shown to a person, and the
statement that holds it.
"""

from __future__ import annotations

import ast
import linecache
import os
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

from msgspec.structs import replace

from recompute_scan.frameworks.mechanism import Mechanism
from recompute_scan.record.execute import run_program
from recompute_scan.record.given import Made, SourceLine, given_at, variables
from recompute_scan.record.ownership import Owner, Ownership, site_folder
from recompute_scan.run_info import Source, source_lines

CONTEXT = 3


def statement_at(path: Path, line: int) -> Source | None:
    """The innermost statement that spans ``line``, with three lines around it.

    ``None`` where the file cannot be read or parsed, or has no statement there.

    Args:
        path: A Python file.
        line: Line number, from 1.
    """
    try:
        # Cells of a notebook are in no file; IPython keeps them where tracebacks find them.
        kept = str(path) in linecache.cache and not path.exists()
        if kept:
            text = "".join(linecache.getlines(str(path)))
        else:
            with tokenize.open(path) as file:  # by the encoding that it names
                text = file.read()
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = _innermost(tree, line)
    if found is None:
        return None
    statement, alone = found
    lines = [line.rstrip("\r\n") for line in source_lines(text)]
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


class CallSites:
    """Turns frames into sites, and remembers where each one is."""

    def __init__(self, start_folder: Path) -> None:
        self._start = start_folder
        self._ownership = Ownership(start_folder)
        self._places: dict[str, tuple[Path, int]] = {}
        # The same lines are asked for in every step, and paths are slow.
        self._sites: dict[tuple[str, int], str] = {}

    def sources(self) -> dict[str, Source]:
        """The statement at each site that was named, where its source can be read."""
        found = {site: statement_at(path, line) for site, (path, line) in self._places.items()}
        return {
            site: replace(source, installed=site_folder(str(self._places[site][0])) is not None)
            for site, source in found.items()
            if source is not None
        }

    def switched_on_at(self, frame: FrameType | None) -> str:
        """The user's line nearest to this frame, for calls that switch a setting on.

        Without one, the nearest line of a project kept in the user's tree; else the outermost of a
        library. Empty where there is none.
        """
        found = self._nearest(frame)
        return self._site(found[1] if found[0] > Owner.LIBRARY else found[2]) if found else ""

    def called_at(self, frame: FrameType | None) -> str:
        """The user's line nearest to this frame, for calls that checkpoint.

        Without one, the nearest line of a project kept in the user's tree, else of a library. Empty
        where there is none.
        """
        found = self._nearest(frame)
        return self._site(found[1]) if found else ""

    def given_at(self, made: Made, mechanism: Mechanism) -> str:
        """Where the setting of the mechanism has its value from, that this object holds."""
        path, number = self._places.get(made.site, (Path(), 0))
        source = statement_at(path, number) if number else None
        names = {edit.name for edit in mechanism.edits if edit.how in ("keyword", "entry")}
        found = given_at(made, names, mechanism.variables, source.statement if source else None)
        if not isinstance(found, SourceLine):
            return found or made.site
        if site_folder(found.file) is not None:  # the library's own default
            return made.site
        site = f"{self._shown(found.file)}:{found.number}"
        self._places.setdefault(site, (self._start / found.file, found.number))
        return site

    def line_of(self, file: str, line: int) -> str:
        """The site of a line of a file that runs no frame now."""
        site = f"{_cell(file) or self._shown(file)}:{line}"
        self._places.setdefault(site, (self._start / file, line))
        return site

    def file_of(self, site: str) -> str:
        """The file of a site that was named; empty where it was not."""
        place = self._places.get(site)
        return str(place[0]) if place is not None else ""

    def is_users(self, frame: FrameType) -> bool:
        """Whether the frame runs the user's own code."""
        return self._ownership.of(frame) == Owner.USER

    def _nearest(self, frame: FrameType | None) -> tuple[Owner, FrameType, FrameType] | None:
        """The highest owner on the stack, its innermost frame, and the outermost of a library.

        Beyond the start of a backward pass nobody asked for what a recompute calls again, and
        beyond that of the script all is ours.
        """
        best: tuple[Owner, FrameType] | None = None
        outermost = None
        while frame is not None and not (_starts_backward(frame) or _starts_script(frame)):
            owner = self._ownership.of(frame)
            if owner == Owner.USER:
                return owner, frame, frame
            if owner and (best is None or owner > best[0]):
                best = owner, frame
            if owner == Owner.LIBRARY:
                outermost = frame
            frame = frame.f_back
        return (*best, outermost or best[1]) if best else None

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
        folder = site_folder(file)
        if folder is not None:
            return file.removeprefix(folder)
        path = Path(os.path.normpath(self._start / file))
        return str(path.relative_to(self._start)) if path.is_relative_to(self._start) else str(path)


def _starts_backward(frame: FrameType) -> bool:
    name = frame.f_code.co_name
    return name in ("backward", "grad") and frame.f_globals.get("__name__") == "torch.autograd"


def _starts_script(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == run_program.__module__


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
        owner = type(variables(frame).get("self"))
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
