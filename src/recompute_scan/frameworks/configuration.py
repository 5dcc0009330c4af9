"""What a configuration file says, and what a framework knows of its own settings there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal

from msgspec import Struct


class Setting(Struct, frozen=True):
    """One value of a configuration file or command line.

    Attributes:
        path: Its keys, from the root on.
        value: As the file gives it.
        written: Its line, or the file's text where a parser tells none: few lines are ever asked
            for, and to find one takes a walk through the text.
    """

    path: tuple[str, ...]
    value: object
    written: int | str

    @property
    def line(self) -> int:
        """Where its last key is."""
        return self.written if isinstance(self.written, int) else _find(self.path, self.written)


Variant = Literal["reentrant", "non-reentrant", "default", "unknown"]
# What is said where files do not tell.
RUN = "`recompute-scan run` counts what happens."

# The settings of one file, by their paths.
Values = Mapping[tuple[str, ...], Setting]


class Flaw(Struct, frozen=True):
    """What is wrong with settings by themselves: a finding of ``lint``, but for its file.

    Attributes:
        line: The line to change.
        code: The rule's.
        title: What is so.
        why: Why, as read in the framework's own code.
        fix: What to do.
        edit: That as an edit of the line: set its value to false.
        unless: What a script that was read may have in it that makes all well.
    """

    line: int
    code: str
    title: str
    why: str
    fix: str
    edit: Literal["", "off"] = ""
    unless: tuple[str, ...] = ()


class SettingSwitch(Struct, frozen=True):
    """A checkpoint that a setting switches on: by what, around what, of which variant."""

    by: str
    layers: str
    variant: Variant


def truthy(value: object) -> bool:
    """Whether a setting is on, as accelerate and argument parsers read it."""
    return value is True or (
        isinstance(value, str) and value.strip().lower() in ("true", "yes", "on", "1", "y", "t")
    )


def value_of(settings: Iterable[Setting], *path: str) -> object:
    """The value at a path, or ``None``."""
    return next((s.value for s in settings if s.path == path), None)


def _find(path: tuple[str, ...], text: str) -> int:
    """The line of the last key, looked for after those before it."""
    start = 0
    for key in path:
        if key == "[]":
            continue
        quoted = re.escape(key)
        found = re.compile(rf"[\"'\[.]{quoted}[\"'\].]|^[^\S\n]*{quoted}[^\S\n]*=", re.MULTILINE)
        hit = found.search(text, start)
        start = hit.end() - 1 if hit else start
    return text.count("\n", 0, start) + 1
