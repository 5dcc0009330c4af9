"""Settings of ``lint``, ``check`` and ``run`` in a project's ``pyproject.toml``."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recompute_scan.errors import UsageError, how_to_add
from recompute_scan.files import content

_FILE = "pyproject.toml"
_LARGEST = 1 << 20
# Above any count; a number that no float holds could not be shown.
_MOST = 1e15
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

_SEVERITIES = ("error", "warning", "info", "none")


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


@dataclass(frozen=True)
class LintSettings:
    """``[tool.recompute-scan.lint]``.

    Attributes:
        select: Codes, or beginnings of codes, that are reported; empty for all.
        ignore: Codes, or beginnings of codes, that are not.
        exclude: Patterns of paths below the project that are not read.
        fail_on: The mildest severity that ends the command with 1; ``none`` for none.
        root: The project's folder.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    fail_on: str = "error"
    root: Path = Path()

    def wants(self, code: str) -> bool:
        """Whether a finding of this code is reported."""
        return (not self.select or code.startswith(self.select)) and not (
            self.ignore and code.startswith(self.ignore)
        )


@dataclass(frozen=True)
class CheckSettings:
    """``[tool.recompute-scan.check]``, as the options of ``check`` would say it."""

    fail_on: str | None = None
    max_recompute: float | None = None
    max_cost: tuple[str, ...] = ()
    baseline: Path | None = None


def lint_settings(start: Path) -> LintSettings:
    """Those of the project around a folder; the defaults where it says nothing.

    Raises:
        UsageError: A key is unknown, or its value is none that it takes (``E240``).
    """
    file, table = _table(start, "lint")
    known = {"select", "ignore", "exclude", "fail-on"}
    _known(file, "lint", table, known)
    codes = {key: _texts(file, "lint", table, key) for key in ("select", "ignore", "exclude")}
    for key in ("select", "ignore"):
        for code in codes[key]:
            if not re.fullmatch(r"RS\d{0,3}", code):
                raise _wrong(file, "lint", key, "codes such as RS602, or RS6 for all starting so")
    fail_on = table.get("fail-on", "error")
    if fail_on not in _SEVERITIES:
        raise _wrong(file, "lint", "fail-on", f"one of {', '.join(_SEVERITIES)}")
    return LintSettings(**codes, fail_on=fail_on, root=file.parent)


def check_settings(start: Path) -> CheckSettings:
    """Those of the project around a folder; the defaults where it says nothing.

    Raises:
        UsageError: A key is unknown, or its value is none that it takes (``E240``).
    """
    file, table = _table(start, "check")
    _known(file, "check", table, {"fail-on", "max-recompute", "max-cost", "baseline"})
    most = table.get("max-recompute")
    if most is not None and not _is_threshold(most):
        raise _wrong(file, "check", "max-recompute", "a number from 0 to 1e15")
    baseline = table.get("baseline")
    if baseline is not None and not isinstance(baseline, str):
        raise _wrong(file, "check", "baseline", "a path")
    fail_on = _texts(file, "check", table, "fail-on")
    return CheckSettings(
        fail_on=",".join(fail_on) if fail_on else None,
        max_recompute=most,
        max_cost=_texts(file, "check", table, "max-cost"),
        baseline=file.parent / baseline if baseline else None,
    )


def run_settings(start: Path, names: Mapping[str, str]) -> dict[str, Any]:
    """Values of the options of ``run`` that the project around a folder sets, by parameter.

    Args:
        start: The folder.
        names: The parameter of each option, by its name without dashes.

    Raises:
        UsageError: A key is no option, or its value is no text, number or truth (``E240``).
    """
    file, table = _table(start, "run")
    _known(file, "run", table, set(names))
    for key, value in table.items():
        if not isinstance(value, str | int | float | bool):
            raise _wrong(file, "run", key, "what the option takes")
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
            raise _wrong(file, command, "", "a table")
        return file, part
    return absolute / _FILE, {}


def _parsed(file: Path, data: bytes) -> dict[str, Any]:
    import msgspec  # noqa: PLC0415 - with its TOML reader, which few need

    try:
        refuse_long_keys(data.decode("utf-8", "replace"))
        found = msgspec.toml.decode(data)
    except ImportError:
        raise UsageError(
            "E240",
            f"{file} cannot be read.",
            why="TOML needs tomli before Python 3.11",
            hint=how_to_add("lint"),
        ) from None
    except RecursionError:
        why = "its values are nested too deep"
        raise UsageError("E240", f"{file} cannot be read.", why=why) from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise UsageError("E240", f"{file} is no TOML.", why=str(error)) from None
    return found if isinstance(found, dict) else {}


def _known(file: Path, command: str, table: dict[str, Any], known: set[str]) -> None:
    for key in sorted(set(table) - known):
        raise _wrong(file, command, key, f"one of {', '.join(sorted(known))}")


def _is_threshold(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= _MOST  # no nan is


def _texts(file: Path, command: str, table: dict[str, Any], key: str) -> tuple[str, ...]:
    """A list of texts; one alone, or a number, may stand for itself."""
    given = table.get(key, [])
    given = given if isinstance(given, list) else [given]
    if any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in given):
        raise _wrong(file, command, key, "a list of texts")
    return tuple(str(item) for item in given)


def _wrong(file: Path, command: str, key: str, wanted: str) -> UsageError:
    where = f"[tool.recompute-scan.{command}]"
    what = f"{key!r} in {where}" if key else where
    return UsageError("E240", f"{what} of {file} is not understood.", hint=f"give {wanted}")
