"""What the recording does now, a line a phase on standard error; silent off a terminal."""

from __future__ import annotations

import sys

from recompute_scan.terminal import fresh_line


class Progress:
    """Says each phase once."""

    def __init__(self, *, wanted: bool = True) -> None:
        self._on = wanted and sys.stderr is not None and sys.stderr.isatty()
        self._said = ""

    def show(self, text: str) -> None:
        """Say it, unless it was what was said last."""
        if self._on and text != self._said:
            line = f"{fresh_line(sys.stderr)}recompute-scan: {text}"
            print(line, file=sys.stderr, flush=True)
            self._said = text
