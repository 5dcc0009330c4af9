"""What goes on, on a terminal: a line before each long piece of work, a bar where that takes long.

The bar is drawn by a thread, below the line, from two seconds on; whatever is printed next takes it
away first (:func:`clear`). Nothing of this is written to anything but a terminal.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from recompute_scan.how_far import how_far
from recompute_scan.terminal import fresh_line, inert

_AFTER_S = 2.0
_EVERY_S = 0.2
_CELLS = 30


def bar(share: float | None, seconds: float) -> str:
    """``  ███████████████···············  50 %, 12 s``; without a share the seconds alone."""
    took = f"{seconds:.0f} s"
    if share is None:
        return f"  {took}"
    full = int(share * _CELLS)
    return f"  {'█' * full}{'·' * (_CELLS - full)}  {share:.0%}, {took}".replace("%", " %")


class Bar:
    """One at a time, below the last line that said what goes on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._began: float | None = None
        self._drawn = 0
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """A piece of work begins now."""
        with self._lock:
            self._began = self._clock()
            if self._thread is None:
                self._thread = threading.Thread(target=self._keep_drawing, daemon=True)
                self._thread.start()

    def clear(self) -> None:
        """The work is over, or something else will be printed."""
        with self._lock:
            self._began = None
            if self._drawn:
                self._write("\r" + " " * self._drawn + "\r")
                self._drawn = 0

    def draw(self) -> None:
        """Draw it as it is now, once the work takes long."""
        with self._lock:
            if self._began is None or (took := self._clock() - self._began) < _AFTER_S:
                return
            text = bar(how_far(), took)
            self._write("\r" + text + " " * max(0, self._drawn - len(text)))
            self._drawn = len(text)

    def _keep_drawing(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            try:
                self.draw()
            except (OSError, ValueError):  # the terminal is gone, or cannot spell it
                return

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


_BAR = Bar()


def clear() -> None:
    """Take the bar away: something else is printed, or nothing goes on any more."""
    _BAR.clear()


def announce(message: str) -> None:
    """Say what begins, without a bar: what follows writes to the terminal itself."""
    if sys.stderr is not None and sys.stderr.isatty():
        clear()
        sys.stderr.write(f"{fresh_line(sys.stderr)}recompute-scan: {inert(message)}\n")
        sys.stderr.flush()


def progress(message: str) -> None:
    """Say what begins, and show how far it is where it takes long."""
    announce(message)
    if sys.stderr is not None and sys.stderr.isatty():
        _BAR.begin()
