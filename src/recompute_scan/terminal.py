"""What a terminal can do, and lines of our own among those of a script on it."""

from __future__ import annotations

import os
from typing import TextIO

_COLUMNS = 80
# Prose in longer lines is hard to read.
_MOST_COLUMNS = 110
# Variables of the environment by which terminals that know links (OSC 8) name themselves.
_LINKING = ("VTE_VERSION", "KITTY_WINDOW_ID", "WT_SESSION", "KONSOLE_VERSION", "WEZTERM_PANE")
_LINKING_PROGRAMS = ("iTerm.app", "WezTerm", "vscode", "ghostty", "Hyper")


def colored(stream: TextIO | None) -> bool:
    """Whether to write ANSI codes: on a terminal, unless ``NO_COLOR`` or ``FORCE_COLOR`` is set.

    See https://no-color.org and https://force-color.org; an empty value says nothing.
    """
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or _is_terminal(stream)


def _is_terminal(stream: TextIO | None) -> bool:
    # Where it was closed before Python began, there is no stream.
    return stream is not None and stream.isatty()


def links(stream: TextIO | None) -> bool:
    """Is this a terminal that is known to show links?"""
    program = os.environ.get("TERM_PROGRAM") in _LINKING_PROGRAMS
    known = program or any(os.environ.get(name) for name in _LINKING)
    return known and colored(stream) and _is_terminal(stream)


def width(stream: TextIO | None) -> int:
    """How many columns to write: those of the terminal, from 80 to 110; 80 elsewhere."""
    if stream is None or not stream.isatty():
        return _COLUMNS
    return min(max(columns(stream), _COLUMNS), _MOST_COLUMNS)


def columns(stream: TextIO) -> int:
    """The terminal's own number of columns; 80 where it has none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or _COLUMNS
    except (OSError, ValueError):  # no terminal of the system's
        return _COLUMNS


def fresh_line(stream: TextIO | None) -> str:
    """What brings the cursor of a terminal to the beginning of a line; empty for anything else.

    As many blanks as a line has columns, and a return: from the beginning of a line they fill it,
    to be written over, and behind other text (a progress bar, a line without an end) they go on to
    the next.
    """
    if stream is None or not stream.isatty():
        return ""
    return " " * columns(stream) + "\r"
