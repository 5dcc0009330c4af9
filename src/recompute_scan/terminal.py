"""Lines of our own among those of a script, on a terminal."""

from __future__ import annotations

import os
from typing import TextIO

_COLUMNS = 80


def fresh_line(stream: TextIO | None) -> str:
    """What brings the cursor of a terminal to the beginning of a line; empty for anything else.

    As many blanks as a line has columns, and a return: from the beginning of a line they fill it,
    to be written over, and behind other text (a progress bar, a line without an end) they go on to
    the next.
    """
    if stream is None or not stream.isatty():
        return ""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # no terminal of the system's
        columns = 0
    return " " * (columns or _COLUMNS) + "\r"
