"""Which files are read, what of them is suppressed, and the whole answer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.errors import InputError
from recompute_scan.files import opened
from recompute_scan.frameworks.configuration import Setting
from recompute_scan.lint.accepted import Unused, acceptances, sorted_out
from recompute_scan.lint.doubling import script_findings, settings_findings
from recompute_scan.lint.launches import Launch, launch_findings, read_shell
from recompute_scan.lint.pins import pinned_beside
from recompute_scan.lint.python import ImportedCall, Script, read_script
from recompute_scan.lint.said import CheckpointSwitch, Found, Pinned, Unreadable
from recompute_scan.lint.settings import read_settings
from recompute_scan.lint.switched_on import SwitchInFile, on_in_script, on_in_settings
from recompute_scan.project_file import LintSettings

_CONFIGURATION = {".yaml", ".yml", ".json", ".toml"}
_SUFFIXES = {".py", ".sh", ".bash", ".slurm", *_CONFIGURATION}
_LARGEST = {".py": 2_000_000}
_LARGE = 256_000
_SEVERITIES = ("error", "warning", "info")
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
    """

    found: tuple[Found, ...]
    suppressed: tuple[Found, ...]
    read: int
    unread: tuple[tuple[str, str], ...]
    undecided: tuple[tuple[str, str], ...]
    unused: tuple[Unused, ...] = ()
    fail_on: str = "error"
    switched_on: tuple[SwitchInFile, ...] = ()

    @property
    def status(self) -> int:
        """Exit status: 1 something is refused, 4 a named file was not read, 0 passed."""
        refused = (
            _SEVERITIES[: _SEVERITIES.index(self.fail_on) + 1] if self.fail_on != "none" else ()
        )
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
    """
    for path in paths:
        if not path.exists():
            raise InputError("E301", f"Cannot read {path}.", why="there is no such file")
    texts: dict[Path, str] = {}
    scripts: dict[Path, Script] = {}
    configurations: dict[Path, list[Setting]] = {}
    unread: dict[Path, str] = {}
    for path in dict.fromkeys(file for asked in paths for file in _files(asked)):
        if path not in paths and _excluded(path, project):
            continue
        try:
            texts[path] = text = _text(path)
            if path.suffix == ".py":
                scripts[path] = read_script(text)
            elif path.suffix in _CONFIGURATION:
                configurations[path] = read_settings(text, path.suffix)
        except Unreadable as error:
            unread[path] = str(error)
            texts.pop(path, None)
    calls = frozenset[str]().union(*(script.calls for script in scripts.values()))
    found: set[Found] = set()
    on: set[SwitchInFile] = set()
    pins: dict[Path, Pinned] = {
        folder: pinned_beside(folder, installed) for folder in {path.parent for path in texts}
    }
    elsewhere = _wrappers_from_elsewhere(scripts)
    scripts = {path: replace(script, switches=elsewhere[path]) for path, script in scripts.items()}
    for path, script in scripts.items():
        found.update(script_findings(str(path), script, pins[path.parent]))
        on.update(on_in_script(str(path), script, pins[path.parent]))
    for path, settings in configurations.items():
        on.update(on_in_settings(str(path), settings, pins[path.parent]))
        found.update(settings_findings(str(path), settings, pins[path.parent], calls))
    for path, text in list(texts.items()):
        if path.suffix != ".py" and path.suffix not in _CONFIGURATION:
            found.update(_launches(path, text, texts, scripts, pins[path.parent]))
    kept: list[Found] = []
    suppressed: list[Found] = []
    unused: list[Unused] = []
    for path, text in texts.items():
        of_file = [f for f in found if f.file == str(path) and project.wants(f.code)]
        comments = acceptances(text, python=path.suffix == ".py")
        said, hidden, idle = sorted_out(str(path), of_file, comments)
        kept += said
        suppressed += hidden
        unused += idle
    return Report(
        found=tuple(sorted(kept)),
        suppressed=tuple(sorted(suppressed)),
        read=len(texts),
        unread=tuple((str(path), why) for path, why in unread.items()),
        undecided=tuple((str(path), why) for path, why in unread.items() if path in paths),
        unused=tuple(sorted(unused)),
        fail_on=project.fail_on,
        switched_on=tuple(sorted(on)),
    )


def _excluded(path: Path, project: LintSettings) -> bool:
    """Whether a pattern takes the file, or a folder that it is in."""
    inside = Path(os.path.relpath(path.absolute(), project.root)).as_posix()
    return any(
        fnmatch(inside, pattern) or fnmatch(inside, f"{pattern.rstrip('/')}/*")
        for pattern in project.exclude
    )


def _launches(
    path: Path, text: str, texts: dict[Path, str], scripts: dict[Path, Script], pinned: Pinned
) -> Iterator[Found]:
    for launch in read_shell(text):
        named = launch.get("config_file")
        config = _named(path, named.value if named else None)
        script = _named(path, launch.script)
        arguments = _arguments(path, launch, config)
        try:
            settings = read_settings(_text(config), config.suffix) if config else []
            given = read_settings(_text(arguments), arguments.suffix) if arguments else []
            if script and script not in scripts:
                scripts[script] = read_script(_text(script))
        except Unreadable:
            continue
        for file in filter(None, (config, script)):
            texts.setdefault(file, _text(file))
        yield from launch_findings(
            str(path),
            launch,
            (str(config), settings),
            (str(arguments), given),
            (str(script), scripts[script]) if script else None,
            pinned,
        )


def _arguments(beside: Path, launch: Launch, config: Path | None) -> Path | None:
    """The file that a script is given as its arguments."""
    named = (_named(beside, name) for name in launch.files if not name.endswith(".py"))
    return next((path for path in named if path and path != config), None)


def _named(beside: Path, name: object) -> Path | None:
    """The file that a command names, from the working folder or from beside the script."""
    if not isinstance(name, str) or "\0" in name or "$" in name:
        return None
    for folder in (beside.parent, Path()):
        path = folder / name
        with suppress(OSError):  # what is no name of a file, being too long
            if path.suffix in _SUFFIXES and path.is_file():
                return path
    return None


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    # Links to folders are not followed, so that there is no circle.
    for folder, below, names in os.walk(path):
        below[:] = sorted(name for name in below if name not in _SKIPPED and name[0] != ".")
        for name in sorted(names):
            file = Path(folder, name)
            if file.suffix in _SUFFIXES and file.is_file():
                yield file


def _text(path: Path) -> str:
    if path.suffix not in _SUFFIXES:
        raise Unreadable("it is no script or configuration by its name")
    most = _LARGEST.get(path.suffix, _LARGE)
    try:
        with opened(path) as file:
            data = file.read(most + 1)
    except OSError as error:
        raise Unreadable(error.strerror or "it cannot be read") from None
    if len(data) > most:
        raise Unreadable(f"it is larger than {most // 1000} kB")
    if b"\0" in data:
        raise Unreadable("it is binary")
    return data.decode("utf-8-sig", errors="replace")


def _wrappers_from_elsewhere(
    scripts: Mapping[Path, Script],
) -> dict[Path, tuple[CheckpointSwitch, ...]]:
    """The switches of each script, those of imported helpers put where they are called.

    A helper is known where exactly one of the scripts that were read defines it in the module, or
    below the package, that the import names; else the call stays one whose effect is not told.
    """
    defined: dict[str, list[Path]] = {}
    for path, script in scripts.items():
        for name in script.helpers:
            defined.setdefault(name, []).append(path)
    found = {}
    for path, script in scripts.items():
        switches = script.switches
        for call in script.imported:
            switches = _put_in(switches, call, scripts, defined)
        found[path] = switches
    return found


def _put_in(
    switches: tuple[CheckpointSwitch, ...],
    call: ImportedCall,
    scripts: Mapping[Path, Script],
    defined: Mapping[str, list[Path]],
) -> tuple[CheckpointSwitch, ...]:
    module, _, name = call.origin.rpartition(".")
    named = [path for path in defined.get(name, ()) if _within(path, module)]
    if len(named) != 1:
        return switches
    kept = [switch for switch in switches if switch.line != call.line or switch.kind != "wrapper"]
    for place, switch, certain in scripts[named[0]].helpers[name]:
        if place < len(call.given):
            kept.append(
                replace(
                    switch,
                    line=call.line,
                    subject=call.given[place],
                    scope=call.scope,
                    branch=call.branch,
                    certain=certain,
                    layers=None,
                )
            )
    return tuple(kept)


def _within(path: Path, module: str) -> bool:
    """Whether a file is the module of that name, or below the package of that name."""
    parts = tuple(part for part in module.split(".") if part)
    inside = path.with_suffix("").parts
    return any(
        inside[start : start + len(parts)] == parts for start in range(len(inside) - len(parts) + 1)
    )
