"""One line on standard error that shows how far the recording is; silent off a terminal."""

from __future__ import annotations

import sys


class Progress:
    """The line. ``show`` replaces it, ``clear`` takes it away."""

    def __init__(self, *, wanted: bool = True) -> None:
        self._on = wanted and sys.stderr is not None and sys.stderr.isatty()
        self._width = 0

    def show(self, text: str) -> None:
        """Put this text in place of the last."""
        if self._on:
            line = f"recompute-scan: {text}"
            print(f"\r{line:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(line)

    def clear(self) -> None:
        """Leave an empty line, so that what is printed next starts clean."""
        if self._on and self._width:
            print(f"\r{'':<{self._width}}\r", end="", file=sys.stderr, flush=True)
            self._width = 0
