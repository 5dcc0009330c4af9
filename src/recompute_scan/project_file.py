"""Settings of ``lint``, ``check`` and ``run`` in a project's ``pyproject.toml``."""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict

from recompute_scan.errors import UsageError
from recompute_scan.files import content

_FILE = "pyproject.toml"
_LARGEST = 1 << 20
# TOML in the pieces that matter here: texts, comments, bare words, dots, anything else.
_PIECES = re.compile(
    r'"""[\s\S]*?"""'
    r"|'''[\s\S]*?'''"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|[\"'#][^\n]*"
    r"|[\w+-]+|\.|[ \t]+|."
)
_MOST_PARTS = 50
_T = TypeVar("_T")


def refuse_long_keys(text: str) -> None:
    """Refuse TOML with a key of many parts: reading one takes memory with the square of them.

    Raises:
        ValueError: A key has more than 50 parts.
    """
    dots = 0
    for piece in _PIECES.finditer(text):
        first = piece[0][0]
        if first == ".":
            dots += 1
            if dots > _MOST_PARTS:
                raise ValueError(f"a key has more than {_MOST_PARTS} parts")
        elif not (first in "\"'_+- \t" or first.isalnum()):
            dots = 0


# Texts; a number may stand for its text.
_Texts = tuple[str | int | float, ...]
_Codes = tuple[Annotated[str, Meta(pattern=r"^RS[0-9]{0,3}\Z")], ...]
# Keys that take a list, or what may stand for a list of one.
_LISTS = {"lint": {"select", "ignore", "exclude"}, "check": {"fail-on", "max-cost"}}


class LintTable(Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """``[tool.recompute-scan.lint]``.

    Attributes:
        select: Codes, or beginnings of codes, that are reported; empty for all.
        ignore: Codes, or beginnings of codes, that are not.
        exclude: Patterns of paths below the project that are not read.
        fail_on: The mildest severity that ends the command with 1; ``none`` for none.
    """

    select: _Codes = ()
    ignore: _Codes = ()
    exclude: _Texts = ()
    fail_on: Literal["error", "warning", "info", "none"] = "error"

    def wants(self, code: str) -> bool:
        """Whether a finding of this code is reported."""
        return (not self.select or code.startswith(self.select)) and not (
            self.ignore and code.startswith(self.ignore)
        )


class LintSettings(LintTable, frozen=True):
    """The table, and the project's folder."""

    root: Path = Path()


class CheckTable(Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """``[tool.recompute-scan.check]``, as the options of ``check`` would say it."""

    fail_on: _Texts = ()
    # The end is above any count; a number that no float holds could not be shown.
    max_recompute: Annotated[float, Meta(ge=0, le=1e15)] | None = None
    max_cost: _Texts = ()
    baseline: str | None = None


def lint_settings(start: Path, codes: Collection[str] = ()) -> LintSettings:
    """Those of the project around a folder; the defaults where it says nothing.

    Args:
        start: The folder.
        codes: All codes that there are: each of ``select`` begins one. Empty for no such check.

    Raises:
        UsageError: A key is unknown, or its value is none that it takes (``E240``).
    """
    file, table = _table(start, "lint")
    found = _known(file, "lint", table, LintTable)
    for one in found.select if codes else ():
        if not any(code.startswith(one) for code in codes):
            there = f"lint has {min(codes)} to {max(codes)}"
            raise _wrong(file, "lint", "select", why=f"no code begins with {one}", hint=there)
    return LintSettings(**asdict(found), root=file.parent)


def check_settings(start: Path) -> tuple[CheckTable, Path]:
    """The project around a folder says these, or the defaults; and the project's folder.

    Raises:
        UsageError: A key is unknown, or its value is none that it takes (``E240``).
    """
    file, table = _table(start, "check")
    return _known(file, "check", table, CheckTable), file.parent


def run_settings(start: Path, names: Mapping[str, str]) -> dict[str, Any]:
    """Values of the options of ``run`` that the project around a folder sets, by parameter;
    ``names`` has the parameter of each option, by its name without dashes.

    Raises:
        UsageError: A key is no option, or its value is no text, number or truth (``E240``).
    """
    file, table = _table(start, "run")
    for key, value in table.items():
        if key not in names:
            raise _wrong(file, "run", key, hint=f"give one of {', '.join(sorted(names))}")
        if not isinstance(value, str | int | float | bool):
            raise _wrong(file, "run", key, hint="give what the option takes")
    return {names[key]: value for key, value in table.items()}


def _table(start: Path, command: str) -> tuple[Path, dict[str, Any]]:
    """The nearest file above a folder that has our table, and the command's part of it."""
    absolute = start.absolute()
    for folder in (absolute, *absolute.parents):
        file = folder / _FILE
        try:
            data = content(file, _LARGEST)
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise UsageError("E240", f"Cannot use {file}.", why=error.strerror) from None
            continue
        # Whoever says nothing of us needs no TOML reader, and may have any file there.
        if b"recompute-scan" not in data:
            continue
        tools = _parsed(file, data).get("tool", {})
        ours = tools.get("recompute-scan", {}) if isinstance(tools, dict) else {}
        if not isinstance(ours, dict) or set(ours) - {"lint", "check", "run"}:
            raise UsageError(
                "E240",
                f"[tool.recompute-scan] in {file} holds what is not known.",
                hint="only lint, check and run tables are read",
            )
        part = ours.get(command, {})
        if not isinstance(part, dict):
            raise _wrong(file, command, hint="give a table")
        return file, part
    return absolute / _FILE, {}


def _parsed(file: Path, data: bytes) -> dict[str, Any]:
    try:
        refuse_long_keys(data.decode("utf-8", "replace"))
        found = msgspec.toml.decode(data)
    except RecursionError:
        why = "its values are nested too deep"
        raise UsageError("E240", f"{file} cannot be read.", why=why) from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise UsageError("E240", f"{file} is no TOML.", why=str(error)) from None
    return found if isinstance(found, dict) else {}


def _known(file: Path, command: str, table: dict[str, Any], kind: type[_T]) -> _T:
    lists = _LISTS[command]
    given = {k: [v] if k in lists and not isinstance(v, list) else v for k, v in table.items()}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _wrong(file, command, why=str(error)) from None


def _wrong(file: Path, command: str, key: str = "", **more: str) -> UsageError:
    where = f"{f'{key!r} in ' if key else ''}[tool.recompute-scan.{command}]"
    return UsageError("E240", f"{where} of {file} is not understood.", **more)
