"""A part of a stream in one buffer, so that events are decoded where they lie."""

from __future__ import annotations

from recompute_scan.trace.limits import Limits, refuse_event_size
from recompute_scan.trace.streams import Stream


class Window:
    """The bytes from ``FIRST`` to ``end`` of ``data``; the byte before them is kept free.

    Args:
        stream: Where the bytes come from.
        size: Bytes to hold; grows while a single event does not fit.
        source: The file's name, for messages.
        limits: Bounds the growth.
    """

    FIRST = 1

    def __init__(self, stream: Stream, size: int, source: str, limits: Limits) -> None:
        self.data = bytearray(size + self.FIRST)
        self.end = self.FIRST
        self.ended = False
        # How many bytes of the stream were taken in.
        self._taken = 0
        self._stream = stream
        self._source = source
        self._limit = limits.event_bytes

    def fill(self) -> None:
        """Read until the buffer is full or the stream ends."""
        with memoryview(self.data) as view:
            while self.end < len(view) and not self.ended:
                number = self._stream.readinto(view[self.end :]) or 0
                self.end += number
                self._taken += number
                self.ended = number == 0

    def grow(self) -> None:
        """Make the buffer twice as large and fill it.

        Raises:
            InputError: It would hold more than one event may take (``E315``).
        """
        if len(self.data) > self._limit:
            raise refuse_event_size(self._source, self._limit)
        data = bytearray(2 * len(self.data))
        data[: self.end] = memoryview(self.data)[: self.end]
        self.data = data
        self.fill()

    def drop(self, position: int) -> None:
        """Forget what is before ``position`` and fill up behind."""
        left = self.end - position
        self.data[self.FIRST : self.FIRST + left] = self.data[position : self.end]
        self.end = self.FIRST + left
        self.fill()

    @property
    def position(self) -> int:
        """Where in the stream the bytes begin that are held."""
        return self._taken - (self.end - self.FIRST)

    def rest(self) -> bytes:
        """All bytes that are held."""
        return bytes(memoryview(self.data)[self.FIRST : self.end])

    def behind(self, most: int) -> bytes:
        """Up to ``most`` bytes that follow those that are held."""
        data = bytearray()
        piece = memoryview(bytearray(min(most, 1 << 16)))
        while len(data) < most and not self.ended:
            number = self._stream.readinto(piece[: most - len(data)]) or 0
            data += piece[:number]
            self.ended = number == 0
        return bytes(data)

    def drain(self) -> int:
        """Read the stream to its end and forget it; the number of bytes not held before."""
        scratch = memoryview(bytearray(1 << 16))
        total = 0
        while not self.ended:
            number = self._stream.readinto(scratch) or 0
            total += number
            self.ended = number == 0
        return total
