"""The owner of the code of a call, its line, and the place where a setting was given.

The place of a file says most of it. A file under ``site-packages``, or in any folder to which pip
installed something, belongs to a library, unless the program itself was started from that package:
whoever installs a project and runs ``python -m project.train`` wrote that project. Any other file
is the user's, except for copies of other projects in the user's tree.

Reading a frame's variables changes nothing for the script. Before Python 3.13 a function's frame
has one dictionary for its variables, which each read fills again (PEP 667): code that called
``locals()`` there holds the same dictionary, and its values stay alive.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import cache
from hashlib import sha256
from importlib.util import decode_source
from pathlib import Path
from textwrap import dedent
from types import FrameType, ModuleType

import torch
from msgspec import Struct, field
from msgspec.structs import replace

from recompute_scan.files import content
from recompute_scan.frameworks.base import CONFIGURATIONS, Mechanism
from recompute_scan.frameworks.registry import framework_files
from recompute_scan.record.execute import as_before, run_program
from recompute_scan.result.run_record import Source, source_lines

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
    """The owner of code; of several frames on a stack, one of the highest owner is shown."""

    NOBODY = 0
    LIBRARY = 1
    COPY = 2
    USER = 3


def is_library(module: str, file: str) -> bool:
    """Whether code of this module and file is Python's, torch's or another library's."""
    owner = _owner(module, file, sys.modules.get("__main__"), Path.cwd())
    return owner < Owner.COPY or _is_framework(module.partition(".")[0], file)


@as_before()
def _owner(module: str, file: str, main: object, start: Path) -> Owner:
    if file.startswith(_NOBODYS) or (file.startswith("<") and not file.startswith(_IPYTHON)):
        return Owner.NOBODY
    package = module.partition(".")[0]
    if site_folder(file) is not None:
        own = _programs_package(main)
        return Owner.USER if own and package in (own, "__main__") else Owner.LIBRARY
    if file.startswith(_PYTHONS) or (
        file == getattr(main, "__file__", None) and _installed_starter(main)
    ):
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
                lines = content(notes / "RECORD").decode(errors="replace").splitlines()
                found |= {line.partition(",")[0].partition("/")[0] for line in lines}
    return frozenset(found)


@cache
def _is_framework(package: str, file: str) -> bool:
    """Whether the file is a framework's, as the files next to it show, wherever it is kept."""
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
    for value in list(vars(main).values()):
        module = getattr(value, "__module__", None) if callable(value) else None
        where = str(getattr(sys.modules.get(module), "__file__", None) or "") if module else ""
        if site_folder(where) is not None and Path(where).is_relative_to(folder.parent):
            return str(module).partition(".")[0]
    return ""


CONTEXT = 3
_ENTRY = re.compile("[:=]")


def statement_at(path: Path, line: int) -> Source | None:
    """The innermost statement that spans ``line``, with three lines around it.

    Of a configuration file it is the line alone. ``None`` where the file cannot be read or parsed,
    or has no statement there, or several entries.

    The path is of a Python file, or of one of ``CONFIGURATIONS``.
    """
    try:
        # Cells of a notebook are in no file; IPython keeps them where tracebacks find them.
        kept = str(path) in linecache.cache and not path.exists()
        data = None if kept else content(path)
        text = "".join(linecache.getlines(str(path))) if data is None else decode_source(data)
        lines = [line.rstrip("\r\n") for line in source_lines(text)]
        around = CONTEXT
        if path.suffix in CONFIGURATIONS:
            # Other entries may hold secrets, on the lines around it and on the line itself.
            if line > len(lines) or len(_ENTRY.findall(lines[line - 1])) != 1:
                return None
            begin, end, alone, whole, around = line, line, False, True, 0
        elif found := _innermost(ast.parse(text), line):
            statement, alone = found
            begin, end, whole = statement.lineno, _end(statement), _whole_lines(statement, lines)
        else:
            return None
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    first = max(1, begin - around)
    return Source(
        first=first,
        text="\n".join(lines[first - 1 : end + around]),
        begin=begin,
        end=end,
        alone=alone,
        whole_lines=whole,
        digest=sha256(data).hexdigest() if data is not None else "",
    )


def _innermost(tree: ast.AST, line: int) -> tuple[ast.stmt, bool] | None:
    best: tuple[ast.stmt, bool] | None = None
    for node in ast.walk(tree):
        for block in [one for _, one in ast.iter_fields(node) if isinstance(one, list)]:
            for child in [one for one in block if isinstance(one, ast.stmt)]:
                if child.lineno <= line <= (child.end_lineno or child.lineno):
                    # Breadth first: a later match lies deeper.
                    best = child, len(block) == 1 and not isinstance(node, ast.Module)
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
        # Below a folder above the home, paths would begin with the person's name.
        home = os.path.expanduser("~")  # noqa: PTH111 - pathlib's may raise
        self._above_home = start_folder in Path(home).parents
        self._owners: dict[tuple[str, str], Owner] = {}
        self._main = 0  # no reference: the interpreter takes the script's module apart at its end
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
        """As :meth:`called_at`, for calls that switch a setting on: of a library's frames the
        outermost.
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

    def installed_at(self, frame: FrameType) -> bool | None:
        """Whether the frame's code belongs to a library; ``None`` for Python's and torch's."""
        owner = self.owner_of(frame)
        return None if owner == Owner.NOBODY else owner == Owner.LIBRARY

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
        return self.line_of(found.file, found.number)

    @as_before()
    def line_of(self, file: str, line: int) -> str:
        """The site of a line of a file."""
        cell = _cell(file)
        site = f"{cell or self._shown(file)}:{line}"
        self._places.setdefault(site, (Path(file) if cell else self._start / file, line))
        return site

    def file_of(self, site: str) -> str:
        """The file of a site that was named; empty where it was not."""
        return str(self._places[site][0]) if site in self._places else ""

    def owner_of(self, frame: FrameType) -> Owner:
        """The owner of the code that this frame runs."""
        main = sys.modules.get("__main__")
        if id(main) != self._main:  # the program has begun since
            self._main = id(main)
            self._owners.clear()
        key = str(frame.f_globals.get("__name__") or ""), frame.f_code.co_filename
        owner = self._owners.get(key)
        if owner is None:
            owner = self._owners[key] = _owner(*key, main, self._start)
        return owner

    def is_users(self, frame: FrameType) -> bool:
        """Whether the frame runs the user's own code."""
        return self.owner_of(frame) == Owner.USER

    def _nearest(self, frame: FrameType | None) -> tuple[Owner, FrameType, FrameType] | None:
        """The highest owner on the stack, its innermost frame, and the outermost of a library.

        Frames beyond the start of a backward pass did not ask for a recompute's calls, and
        frames beyond the start of the script are ours.
        """
        best: tuple[Owner, FrameType] | None = None
        outermost = None
        while frame is not None and not _starts(frame):
            owner = self.owner_of(frame)
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
        if (file, line) not in self._sites:
            self._sites[file, line] = self.line_of(file, line)
        return self._sites[file, line]

    def _shown(self, file: str) -> str:
        folder = site_folder(file)
        if folder is not None:
            return file.removeprefix(folder)
        path = Path(os.path.normpath(self._start / file))
        below = path.is_relative_to(self._start) and not self._above_home
        return str(path.relative_to(self._start)) if below else str(path)


def _starts(frame: FrameType) -> bool:
    """Does it start a backward pass, or the script?"""
    module, name = frame.f_globals.get("__name__"), frame.f_code.co_name
    backward = name in ("backward", "grad") and module == "torch.autograd"
    return backward or module == run_program.__module__


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


# A function that names one of these in its code may hold that dictionary.
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
_MOST_BYTES = 1_000_000


class Made(Struct, frozen=True, eq=False):
    """A settings object at the moment when it was made: its line and its class, the program's
    arguments and the environment then.
    """

    site: str
    kind: type
    arguments: tuple[str, ...] = field(default_factory=lambda: tuple(sys.argv[1:]))
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


class SourceLine(Struct, frozen=True):
    file: str
    number: int


def given_at(
    made: Made, names: Collection[str], variables: Collection[str], statement: str | None
) -> str | SourceLine | None:
    """Where the setting has its value from; ``None`` for the statement that made the object.

    An option of the command line is given as it was written there, without its value; a variable
    of the environment by its name.

    ``variables`` of the environment set it too; ``statement`` is the source of the statement that
    made the object, where it is known.
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
    """Names in the value that the statement gives the setting; ``None`` where it gives none."""
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
    """Names that options may have: ``a.b["c"]`` is the option ``c``."""
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
            if path.suffix not in CONFIGURATIONS:
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
