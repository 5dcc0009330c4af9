"""Long pieces of work: how far they have come, and no search for reference cycles meanwhile.

Working code offers its share with :func:`reporting`; drawing code asks with :func:`how_far`.
Nothing is called in between, so that the work itself gets no slower.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

_shares: list[Callable[[], float]] = []


class Pieces:
    """Pieces of work that take about as long as each other.

    Args:
        planned: How many there will be, as far as is known before.
        clock: Seconds.
    """

    def __init__(self, planned: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._planned = planned
        self._clock = clock
        self._ends = [clock()]

    def done(self) -> None:
        """One more is done."""
        self._ends.append(self._clock())

    def share(self) -> float:
        """How much is done, the one that goes on by how long the others took; below 1."""
        made = len(self._ends) - 1
        usual = (self._ends[-1] - self._ends[0]) / made if made else 0.0
        part = min(0.95, (self._clock() - self._ends[-1]) / usual) if usual > 0 else 0.0
        return (made + part) / max(self._planned, made + 1)


@contextmanager
def reporting(share: Callable[[], float]) -> Iterator[None]:
    """While the body runs, ``share`` gives how much of the work is done, from 0 to 1.

    It may be called from another thread, and may raise ``OSError`` or ``ValueError`` where it does
    not know.
    """
    _shares.append(share)
    try:
        yield
    finally:
        _shares.remove(share)


@contextmanager
def reading(file: IO[bytes]) -> Iterator[None]:
    """While the body runs, the share is the part of the file's bytes that have been read."""
    size = max(1, os.fstat(file.fileno()).st_size)
    with reporting(lambda: os.lseek(file.fileno(), 0, os.SEEK_CUR) / size):
        yield


def how_far() -> float | None:
    """The share of the innermost work that is done, from 0 to 1; ``None`` where it is not known."""
    with suppress(IndexError, OSError, ValueError):
        return min(1.0, max(0.0, _shares[-1]()))
    return None


@contextmanager
def paused() -> Iterator[None]:
    """No search for cycles meanwhile; objects without references are freed at once all the same."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
