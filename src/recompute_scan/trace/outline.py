"""Which parts of a file hold which times, so that a second reading passes over most of it."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from itertools import pairwise

from msgspec import Struct, field

_TIME = re.compile(rb'"ts"\s*:\s*(\d+(?:\.\d+)?)[\s,}]')


def earliest(data: bytearray, first: int, stop: int) -> float:
    """The earlier of the times that stand first and last in a part of a buffer, ns.

    Minus infinity where either cannot be told.
    """
    times = []
    for at in (data.find(b'"ts"', first, stop), data.rfind(b'"ts"', first, stop)):
        written = _TIME.match(data, max(at, 0))
        if not written:
            return -math.inf
        times.append(float(written[1]) * 1000)
    return min(times)


class Outline(Struct):
    """The parts of a plain file, in order.

    Attributes:
        begins: Where in the file each begins: with an event, except for the first.
        earliest: The earlier of the times of its first and last event, ns; minus infinity where
            it is unknown.
    """

    begins: list[int] = field(default_factory=lambda: [0])
    earliest: list[float] = field(default_factory=lambda: [-math.inf])

    def add(self, begin: int, time: float) -> None:
        """Note the next part."""
        self.begins.append(begin)
        self.earliest.append(time)

    def before(self, time: int) -> Iterator[tuple[int, int | None]]:
        """Begin and end of the parts that do not begin and end at this time, in ns, or later.

        The last part, whose end is ``None``, is always among them.
        """
        ends = pairwise([*self.begins, None])
        for (begin, end), earliest in zip(ends, self.earliest, strict=True):
            if begin is not None and (earliest < time or end is None):
                yield begin, end


class Excerpt:
    """Parts of a file as one stream; each begins with an event, so that they read as a trace.

    Args:
        file: The file.
        parts: Begin and end of each, in order; ``None`` for the end of the file.
    """

    def __init__(self, file: io.RawIOBase, parts: Iterator[tuple[int, int | None]]) -> None:
        self._file = file
        self._parts = parts
        self._left = 0

    def readinto(self, buffer: memoryview, /) -> int:
        """See :class:`recompute_scan.trace.streams.Stream`."""
        while not self._left:
            begin, end = next(self._parts, (None, None))
            if begin is None:
                return 0
            self._file.seek(begin)
            size = self._file.seek(0, io.SEEK_END) if end is None else end
            self._file.seek(begin)
            self._left = max(0, size - begin)
        number = self._file.readinto(buffer[: self._left]) or 0
        self._left = self._left - number if number else 0
        return number
