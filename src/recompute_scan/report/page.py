"""A page of a terminal: 80 columns, with or without colour."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, field

import click

from recompute_scan.report.escape import visible
from recompute_scan.units import UNITS

WIDTH = 80
_COLUMN = 22


@dataclass
class Page:
    """The lines written so far."""

    color: bool
    written: list[str] = field(default_factory=list)

    def style(self, text: str, **how: object) -> str:
        return click.style(text, **how) if self.color else text  # type: ignore[arg-type]

    def title(self, text: str) -> None:
        self.written += ["", self.style(text, bold=True)]

    def prose(self, text: str, indent: str = "  ", first: str | None = None, **how: object) -> None:
        """Words wrapped to the width; colour goes on whole lines, so that widths stay true."""
        for line in wrap(visible(text, 2000), indent, indent if first is None else first):
            self.written.append(self.style(line, **how) if how else line)

    def row(self, label: str, value: str, note: str = "", **how: object) -> None:
        head = f"  {label:<{_COLUMN}}"
        plain = f"{head}{value}"
        # the first line is measured without codes, then given them
        rest = wrap(note, " " * (len(head) + 10), f"{plain:<{len(head) + 9}} ")
        shown = self.style(value, **how) if how else value
        self.written.append(head + shown + rest[0][len(plain) :].rstrip())
        self.written += rest[1:]

    def verbatim(self, text: str, indent: str, **how: object) -> None:
        """A line to copy: never wrapped, tabs spelled as spaces."""
        line = indent + text.expandtabs(4)
        self.written.append(self.style(line, **how) if how else line)


def wrap(text: str, indent: str, first: str) -> list[str]:
    """Lines of at most :data:`WIDTH` columns; a word longer than a line is cut.

    A number and its unit stay together.
    ``first`` starts the first line, ``indent`` all others; both are narrower than a line.
    """
    found, line, empty = [], first, True
    for word in _words(text):
        if not empty and columns(line) + 1 + columns(word) > WIDTH:
            found.append(line)
            line, empty = indent, True
        line += word if empty else f" {word}"
        empty = False
        while columns(line) > WIDTH:
            cut = _fitting(line)
            found.append(line[:cut])
            line = indent + line[cut:]
    return [*found, line]


def _words(text: str) -> list[str]:
    found: list[str] = []
    for word in text.split():
        if found and word.rstrip(".,;:)") in UNITS and found[-1][-1].isdigit():
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def _fitting(line: str) -> int:
    """How many characters of a line fit into the width, at least one of them."""
    used = 0
    for place, char in enumerate(line):
        used += columns(char)
        if used > WIDTH:
            return max(place, 1)
    return len(line)


def columns(text: str) -> int:
    """How many terminal columns a text takes; wide (East Asian) characters take two."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)
