"""From files to the answer of `lint`, without the findings that comments accept."""

from __future__ import annotations

import io
import os
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.errors import InputError, UsageError
from recompute_scan.files import content, is_file
from recompute_scan.frameworks.base import Setting
from recompute_scan.lint.doubling import script_findings, settings_findings
from recompute_scan.lint.launches import (
    Launch,
    SwitchInFile,
    launch_findings,
    on_in_launch,
    on_in_script,
    on_in_settings,
    read_documents,
    read_settings,
    read_shell,
)
from recompute_scan.lint.library_calls import Script, pinned_beside
from recompute_scan.lint.python import read_script
from recompute_scan.lint.rules import CheckpointSwitch, Found, Pinned, Unreadable
from recompute_scan.lint.wrappers import nested_findings
from recompute_scan.project_file import LintSettings
from recompute_scan.result.run_record import source_lines

_OURS = re.compile(r"#\s*recompute-scan:\s*ignore(?:\[([^\]]{1,200})\]|(?!\s*\[))\s*(\S.*)?")
_NOQA = re.compile(
    r"#\s*noqa:\s*([A-Z]+\d+(?:[\s,]+[A-Z]+\d+)*)(?:\s*[-:]\s*(\S.*))?", re.IGNORECASE
)

_ANY = re.compile(r"recompute-scan|noqa", re.IGNORECASE)


class Acceptance(Struct, frozen=True):
    """A comment that accepts findings of its line, or of the next where it stands alone.

    Attributes:
        at: The line of the findings that it accepts.
        codes: Their codes; empty for all.
        reason: Why, as written; one is needed.
    """

    line: int
    at: int
    codes: frozenset[str]
    reason: str


class Unused(Struct, frozen=True, order=True):
    """A comment that accepts nothing, and why."""

    file: str
    line: int
    why: str


def acceptances(text: str, *, python: bool) -> list[Acceptance]:
    """The comments of one file."""
    found: list[Acceptance] = []
    if not _ANY.search(text):
        return found
    for number, comment, alone in _comments(text) if python else _lines(text):
        ours, noqa = _OURS.search(comment), _NOQA.search(comment)
        said = ours or noqa
        if said is None:
            continue
        codes = {code.upper() for code in re.split(r"[\s,]+", said[1] or "") if code}
        mine = frozenset(code for code in codes if ours or code.startswith("RS"))
        if (noqa is said or said[1]) and not mine:
            continue  # another tool's, or no code
        reason = said[2] if re.search(r"\w", said[2] or "") else ""
        found.append(Acceptance(number, number + alone, mine, reason))
    return found


def _comments(text: str) -> Iterator[tuple[int, str, bool]]:
    """Python's comments, each with its line and whether it stands alone there."""
    with suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(text, newline=None).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string, not token.line[: token.start[1]].strip()


def _lines(text: str) -> Iterator[tuple[int, str, bool]]:
    for number, line in enumerate(source_lines(text), 1):
        if "#" in line:
            yield number, line, line.lstrip().startswith("#")


def sorted_out(
    file: str, found: Sequence[Found], accepting: Iterable[Acceptance]
) -> tuple[list[Found], list[Found], list[Unused]]:
    """A file's open findings, its accepted ones, and comments that accept nothing."""
    at_line: dict[int, list[Found]] = {}
    for finding in found:
        at_line.setdefault(finding.line, []).append(finding)
    hidden: set[Found] = set()
    idle: list[Unused] = []
    for comment in accepting:
        accepts = [
            finding
            for line in {comment.at, comment.line}
            for finding in at_line.get(line, ())
            if not comment.codes or finding.code in comment.codes
        ]
        if not accepts:
            idle.append(Unused(file, comment.line, "no such finding is here"))
        elif not comment.reason:
            idle.append(Unused(file, comment.line, "it gives no reason, so it suppresses nothing"))
        else:
            hidden.update(accepts)
    kept = [finding for finding in found if finding not in hidden]
    return kept, [finding for finding in found if finding in hidden], idle


_CONFIGURATION = {".yaml", ".yml", ".json", ".toml"}
_SUFFIXES = {".py", ".sh", ".bash", ".slurm", *_CONFIGURATION}
_LARGEST_SCRIPT, _LARGEST = 1_000_000, 256_000
# Of one configuration: to find the line of each takes a walk through the file.
_MOST_SAID = 200
_SEVERITIES = ("none", "error", "warning", "info")
_SKIPPED = {"node_modules", "__pycache__", "site-packages", "build", "dist"}
_DEFAULT = LintSettings()


class Report(Struct, frozen=True):
    """The answer.

    Attributes:
        found: Findings by file and line.
        suppressed: Those that a comment accepts.
        read: How many files were read.
        unread: Files that were not read, with why.
        undecided: Those of them that were asked for by name.
        unused: Comments that accept nothing.
        fail_on: The mildest severity that ends the command with 1.
        switched_on: The checkpoints that each file switches on.
        cut: Scripts that are too much to be followed to the end.
    """

    found: tuple[Found, ...]
    suppressed: tuple[Found, ...]
    read: int
    unread: tuple[tuple[str, str], ...]
    undecided: tuple[tuple[str, str], ...]
    unused: tuple[Unused, ...] = ()
    fail_on: str = "error"
    switched_on: tuple[SwitchInFile, ...] = ()
    cut: tuple[str, ...] = ()

    @property
    def status(self) -> int:
        """Exit status: 1 something is refused, 4 a named file was not read, 0 passed."""
        refused = _SEVERITIES[: _SEVERITIES.index(self.fail_on) + 1]
        if any(finding.severity in refused for finding in self.found):
            return 1
        return 4 if self.undecided else 0


def lint(
    paths: Sequence[Path], project: LintSettings = _DEFAULT, installed: str | None = None
) -> Report:
    """Read these files, and those below these folders that the project does not exclude.

    Args:
        paths: Files and folders.
        project: What the project wants otherwise.
        installed: The version of transformers that counts where a project pins none.

    Raises:
        InputError: A path does not exist (``E301``).
        UsageError: A folder has nothing to read (``E238``).
    """
    files = _Files(paths, project)
    answers = _Answers(files, installed)
    by_file: dict[str, list[Found]] = {}
    for finding in answers.found:
        if project.wants(finding.code):
            by_file.setdefault(finding.file, []).append(finding)
    kept: list[Found] = []
    suppressed: list[Found] = []
    unused: list[Unused] = []
    for path, text in files.texts.items():
        comments = acceptances(text, python=path.suffix == ".py")
        said, hidden, idle = sorted_out(str(path), by_file.get(str(path), ()), comments)
        kept += said
        suppressed += hidden
        unused += idle
    unread = files.unread.items()
    return Report(
        found=tuple(sorted(kept)),
        suppressed=tuple(sorted(suppressed)),
        read=len(files.texts),
        unread=tuple((str(path), why) for path, why in unread),
        undecided=tuple((str(path), why) for path, why in unread if path in paths),
        unused=tuple(sorted(unused)),
        fail_on=project.fail_on,
        switched_on=tuple(sorted(answers.on)),
        cut=answers.cut,
    )


def _excluded(path: Path, project: LintSettings) -> bool:
    """Whether a pattern takes the file, or a folder that it is in."""
    inside = Path(os.path.relpath(path.absolute(), project.root)).as_posix()
    return any(
        fnmatch(inside, pattern) or fnmatch(inside, f"{pattern.rstrip('/')}/*")
        for pattern in map(str, project.exclude)
    )


class _Files:
    """The files that are asked for, and those that commands in them name; each is read once.

    Attributes:
        unread: Files that were asked for and not read, with why.
    """

    def __init__(self, paths: Sequence[Path], project: LintSettings) -> None:
        folders = (path if path.is_dir() else path.parent for path in (*paths, Path()))
        self._roots = {Path(os.path.realpath(folder)) for folder in folders}
        self.texts: dict[Path, str] = {}
        self.scripts: dict[Path, Script] = {}
        self.configurations: dict[Path, list[Setting]] = {}
        self.launches: dict[Path, list[Launch]] = {}
        self.unread: dict[Path, str] = {}
        self._unreadable: set[Path] = set()
        for path in dict.fromkeys(file for asked in paths for file in self._below(asked)):
            if path in paths or not _excluded(path, project):
                try:
                    self._read(path)
                except Unreadable as error:
                    self.unread[path] = str(error)

    def _below(self, path: Path) -> Iterator[Path]:
        if not path.exists() and not path.is_symlink():
            raise InputError("E301", f"Cannot read {path}.", why="there is no such file")
        if not path.is_dir():  # a pipe or a device is named as one that was not read
            yield path
            return
        anything = False
        folders = [str(path)]  # no recursion: they may be nested deeper than Python's limit
        while folders:
            inside: list[os.DirEntry[str]] = []
            with suppress(OSError), os.scandir(folders.pop()) as found:
                inside = sorted(found, key=lambda one: one.name)
                # Links to folders are not followed, so that there is no circle.
                below = [one for one in inside if one.is_dir(follow_symlinks=False)]
                wanted = (one for one in below if one.name not in _SKIPPED and one.name[0] != ".")
                folders += reversed([one.path for one in wanted])
            for one in inside:
                if (file := Path(one.path)).suffix in _SUFFIXES and is_file(file):
                    anything = True
                    if not one.is_symlink() or self._is_inside(file):
                        yield file
        if not anything:
            raise nothing_to_read(path)

    def _is_inside(self, path: Path) -> bool:
        """Whether links lead to what is below the folders asked for, or the working folder."""
        end = Path(os.path.realpath(path))
        return end in self._roots or not self._roots.isdisjoint(end.parents)

    def _read(self, path: Path) -> None:
        text = _text(path)
        if path.suffix == ".py":
            self.scripts[path] = read_script(text)
        elif path.suffix in _CONFIGURATION:
            self.configurations[path] = read_settings(text, path.suffix)
        else:
            self.launches[path] = list(read_shell(text))
        self.texts[path] = text

    def find(self, beside: Path, name: object) -> Path | None:
        """The file that a command names, in the shell script's folder or the working folder."""
        if not isinstance(name, str) or "\0" in name or "$" in name:
            return None
        for folder in (beside.parent, Path()):
            path = folder / name
            with suppress(OSError):  # what is no name of a file, being too long
                if path.suffix in _SUFFIXES and path.is_file() and self._is_inside(path):
                    return path
        return None

    def settings(self, path: Path | None) -> Sequence[Setting]:
        """The settings of a configuration; raises ``Unreadable``."""
        if path is not None and path not in self.configurations:
            text = self._text(path)
            self.configurations[path] = read_settings(text, path.suffix)
        return () if path is None else self.configurations[path]

    def script(self, path: Path | None) -> Script | None:
        """The facts of a script; raises ``Unreadable``."""
        if path is not None and path not in self.scripts:
            self.scripts[path] = read_script(self._text(path))
        return None if path is None else self.scripts[path]

    def _text(self, path: Path) -> str:
        if path in self._unreadable:
            raise Unreadable("it was not read before")
        self._unreadable.add(path)
        self.texts[path] = text = _text(path)
        return text


class _Answers:
    """The answers that the files give.

    Attributes:
        found: Findings, those that comments accept among them.
        on: The checkpoints that each file switches on.
        cut: Scripts that are too much to be followed to the end.
    """

    def __init__(self, files: _Files, installed: str | None) -> None:
        self.found: set[Found] = set()
        self.on: set[SwitchInFile] = set()
        self._files = files
        folders = {path.parent for path in files.texts}
        self._pins = {folder: pinned_beside(folder, installed) for folder in folders}
        self._calls = frozenset[str]().union(*(one.calls for one in files.scripts.values()))
        self.cut = self._scripts()
        for path, settings in files.configurations.items():
            self._settings(path, settings)
        for path, commands in files.launches.items():
            self._shell(path, commands)

    def _scripts(self) -> tuple[str, ...]:
        scripts = self._files.scripts
        for path, switches in _wrappers_from_elsewhere(scripts).items():
            scripts[path] = replace(scripts[path], switches=switches)
        for path, script in scripts.items():
            known = self._pins[path.parent]
            self.found.update(script_findings(str(path), script, known, self._calls))
            self.on.update(on_in_script(str(path), script, known))
        texts = {str(path): self._files.texts[path] for path in scripts}
        nested, cut = nested_findings(texts, {str(path): one for path, one in scripts.items()})
        self.found.update(nested)
        return tuple(sorted(cut))

    def _settings(self, path: Path, settings: Sequence[Setting], *, edits: bool = True) -> None:
        """Of a configuration; of one inside a shell script no edit is offered."""
        known = self._pins[path.parent]
        self.on.update(islice(on_in_settings(str(path), settings, known), _MOST_SAID))
        flaws = islice(settings_findings(str(path), settings, known, self._calls), _MOST_SAID)
        self.found.update(one if edits else replace(one, edit="") for one in flaws)

    def _shell(self, path: Path, commands: Sequence[Launch]) -> None:
        known = self._pins[path.parent]
        for launch in commands:
            self.found.update(self._launched(path, launch, known))
            self.on.update(on_in_launch(str(path), launch, known))
        for document in read_documents(self._files.texts[path]):
            self._settings(path, document, edits=False)

    def _launched(self, path: Path, launch: Launch, known: Pinned) -> Iterator[Found]:
        files = self._files
        chosen = launch.get("config_file")
        config = files.find(path, chosen.value if chosen else None)
        script = files.find(path, launch.script)
        # The file that the script is given as its arguments.
        given = (files.find(path, name) for name in launch.files if not name.endswith(".py"))
        arguments = next((one for one in given if one and one != config), None)
        with suppress(Unreadable):
            yield from launch_findings(
                str(path),
                launch,
                (str(config), files.settings(config)),
                (str(arguments), files.settings(arguments)),
                (str(script), read) if (read := files.script(script)) else None,
                known,
            )


def nothing_to_read(*paths: Path, excluded: bool = False) -> UsageError:
    """The error of paths that hold nothing to read, or nothing that is not excluded."""
    why = "no Python script, shell script, YAML, JSON or TOML is there"
    return UsageError(
        "E238",
        f"There is nothing to read in {', '.join(map(str, paths))}.",
        why=f"{why}, or all are excluded" if excluded else why,
        hint="give the folder that holds the training scripts",
    )


def _text(path: Path) -> str:
    if path.suffix not in _SUFFIXES:
        raise Unreadable("it has no suffix of a script or configuration")
    most = _LARGEST_SCRIPT if path.suffix == ".py" else _LARGEST
    try:
        data = content(path, most)
    except OSError as error:
        raise Unreadable(error.strerror or "it cannot be read") from None
    if b"\0" in data:
        raise Unreadable("it is binary")
    encoding = encoding_of(path, data)
    try:
        return data.decode(encoding, errors="replace")
    except (LookupError, ValueError):  # no encoding of text, or one that replaces nothing
        raise Unreadable(f"its first lines name the encoding {encoding}") from None


def encoding_of(path: Path, data: bytes) -> str:
    """UTF-8, unless the first two lines of a Python file name another encoding."""
    if path.suffix == ".py":
        with suppress(SyntaxError):
            return tokenize.detect_encoding(io.BytesIO(data).readline)[0]
    return "utf-8-sig"


def _wrappers_from_elsewhere(scripts: Mapping[Path, Script]) -> dict[Path, list[CheckpointSwitch]]:
    """The switches of each script; a switch in an imported helper is put where that is called.

    A helper is known where exactly one of the scripts that were read defines it in the module, or
    below the package, that the import names; else the effect of the call stays unknown.
    """
    defined: dict[str, list[Path]] = {}
    for path, script in scripts.items():
        for name in script.helpers:
            defined.setdefault(name, []).append(path)
    found = {}
    for path, script in scripts.items():
        switches = script.switches
        for call in script.imported:
            module, _, name = call.name.rpartition(".")
            named = [file for file in defined.get(name, ()) if _within(file, module)]
            if len(named) != 1:
                continue
            switches = [one for one in switches if one.line != call.line or one.kind != "wrapper"]
            for place, switch, certain in scripts[named[0]].helpers[name]:
                if place < len(call.given):
                    switches.append(switch.moved(call, call.given[place], certain=certain))
        found[path] = switches
    return found


def _within(path: Path, module: str) -> bool:
    """Whether a file is the module of that name, or below the package of that name."""
    parts = tuple(part for part in module.split(".") if part)
    inside = path.with_suffix("").parts
    return any(
        inside[start : start + len(parts)] == parts for start in range(len(inside) - len(parts) + 1)
    )
