"""Which files are read, what of them is suppressed, and the whole answer."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from recompute_scan.errors import InputError
from recompute_scan.lint.facts import Found, Setting, Unreadable, Variant
from recompute_scan.lint.python import Script, read_script
from recompute_scan.lint.rules import launch_findings, script_findings, settings_findings
from recompute_scan.lint.settings import read_settings
from recompute_scan.lint.shell import read_shell

_CONFIGURATION = {".yaml", ".yml", ".json", ".toml"}
_SUFFIXES = {".py", ".sh", ".bash", ".slurm", *_CONFIGURATION}
_LARGEST = {".py": 2_000_000}
_LARGE = 256_000
_SKIPPED = {"node_modules", "__pycache__", "site-packages", "build", "dist"}
_SUPPRESSED = re.compile(r"#\s*recompute-scan:\s*ignore(?:\[([^\]]*)\])?\s*(\S.*)?")
_PINNED = re.compile(r"^\s*transformers\s*(==|~=|<=|<|>=)\s*(\d+)(?:\.(\d+))?", re.MULTILINE)


class Report(Struct, frozen=True):
    """The answer.

    Attributes:
        found: Findings by file and line.
        suppressed: Those that a comment accepts.
        read: How many files were read.
        unread: Files that were not read, with why.
        undecided: Those of them that were asked for by name.
    """

    found: tuple[Found, ...]
    suppressed: tuple[Found, ...]
    read: int
    unread: tuple[tuple[str, str], ...]
    undecided: tuple[tuple[str, str], ...]

    @property
    def status(self) -> int:
        """Exit status: 1 something is certainly wrong, 4 a named file was not read, 0 passed."""
        if any(finding.severity == "error" for finding in self.found):
            return 1
        return 4 if self.undecided else 0


def lint(paths: Sequence[Path]) -> Report:
    """Read these files, and those below these folders.

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
        try:
            texts[path] = text = _text(path)
            if path.suffix == ".py":
                scripts[path] = read_script(text)
            elif path.suffix in _CONFIGURATION:
                configurations[path] = read_settings(text, path.suffix)
        except Unreadable as error:
            unread[path] = str(error)
            texts.pop(path, None)
    deepspeed = any(script.deepspeed_checkpointing for script in scripts.values())
    found: set[Found] = set()
    for path, script in scripts.items():
        found.update(script_findings(str(path), script, _default_of(path.parent)))
    for path, settings in configurations.items():
        found.update(settings_findings(str(path), settings, deepspeed_checkpointing=deepspeed))
    for path, text in texts.items():
        if path.suffix != ".py" and path.suffix not in _CONFIGURATION:
            found.update(_launches(path, text))
    lines = {str(path): text.splitlines() for path, text in texts.items()}
    kept = sorted(finding for finding in found if not _accepted(finding, lines[finding.file]))
    return Report(
        found=tuple(kept),
        suppressed=tuple(sorted(found - set(kept))),
        read=len(texts),
        unread=tuple((str(path), why) for path, why in unread.items()),
        undecided=tuple((str(path), why) for path, why in unread.items() if path in paths),
    )


def _launches(path: Path, text: str) -> Iterator[Found]:
    for launch in read_shell(text):
        named = launch.get("config_file")
        config = _named(path, named.value if named else None)
        script = _named(path, launch.script)
        try:
            settings = read_settings(_text(config), config.suffix) if config else []
            read = read_script(_text(script)) if script else None
        except Unreadable:
            continue
        yield from launch_findings(str(path), launch, settings, read)


def _named(beside: Path, name: object) -> Path | None:
    """The file that a command names, from the working folder or from beside the script."""
    if not isinstance(name, str) or "\0" in name or "$" in name:
        return None
    for folder in (beside.parent, Path()):
        path = folder / name
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
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise Unreadable(error.strerror or "it cannot be read") from None
    if len(data) > most:
        raise Unreadable(f"it is larger than {most // 1000} kB")
    if b"\0" in data:
        raise Unreadable("it is binary")
    return data.decode("utf-8-sig", errors="replace")


def _default_of(folder: Path) -> Variant:
    """The variant of ``gradient_checkpointing_enable()`` in the transformers pinned beside it."""
    found: set[Variant] = set()
    for file in sorted(folder.glob("requirements*.txt")):
        try:
            text = _text_of_pins(file)
        except OSError:
            continue
        for sign, major, minor in _PINNED.findall(text):
            number = (int(major[:4]), int(minor[:4] or 0))
            before = number <= (5, 0) if sign == "<" else number < (5, 0)
            if before and sign != ">=":
                found.add("reentrant")
            elif number >= (5, 0) and sign in ("==", "~=", ">="):
                found.add("non-reentrant")
    return found.pop() if len(found) == 1 else "default"


def _text_of_pins(file: Path) -> str:
    with file.open("rb") as stream:
        return stream.read(_LARGE).decode(errors="replace")


def _accepted(finding: Found, lines: list[str]) -> bool:
    """Whether its line, or the comment above it, says so, with a reason."""
    for number in (finding.line, finding.line - 1):
        text = lines[number - 1] if 0 < number <= len(lines) else ""
        if number != finding.line and not text.lstrip().startswith("#"):
            continue
        said = _SUPPRESSED.search(text)
        if said and said[2]:
            codes = {code.strip().upper() for code in (said[1] or "").split(",")}
            if said[1] is None or finding.code in codes:
                return True
    return False
