"""Bytes in: plain, gzip and Zstandard streams behind one ``readinto``.

Damage never raises here: what inflates before a damaged or cut place is handed out, and a
counter says that the rest is missing.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import IO, Any, Protocol, cast

import zstandard
from isal import igzip_lib

from recompute_scan.trace.health import count
from recompute_scan.trace.limits import Limits, refuse_ratio, refuse_size

GZIP = b"\x1f\x8b"
ZSTANDARD = b"\x28\xb5\x2f\xfd"
_INPUT = 64 * 1024
# What one call inflates is lost when that call meets the damage, so calls are small.
_OUTPUT = 64 * 1024
# Exporters that compress a file that is compressed already exist; nobody does it thrice.
_LAYERS = 3
# isal's stubs call its error an instance.
_DAMAGED = cast("type[Exception]", igzip_lib.IsalError)


class Stream(Protocol):
    """A source of bytes."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill the front of the buffer; the number of bytes, 0 at the end."""


def inflate(
    raw: Stream, source: str, limits: Limits, health: dict[str, int]
) -> tuple[Stream, bool]:
    """The stream's content without compression, and whether there was any.

    Compression is told by the first bytes.

    Raises:
        InputError: While reading, when it inflates beyond ``limits`` (``E310``, ``E311``).
    """
    stream: Stream = raw
    compressed = False
    for _ in range(_LAYERS):
        front = Front(stream)
        stream = front
        if front.first.startswith(GZIP):
            stream = _Gzip(front, source, limits, health)
        elif front.first.startswith(ZSTANDARD):
            stream = _Zstandard(front, source, limits, health)
        else:
            break
        compressed = True
    return stream, compressed


class Bounded:
    """A stream of inflated bytes that refuses to hand out more than ``limits`` allow.

    Args:
        stream: The inflated bytes.
        consumed: How many compressed bytes it took so far.
        source: Its name, for messages.
        limits: The bounds.
    """

    def __init__(
        self, stream: Stream, consumed: Callable[[], int], source: str, limits: Limits
    ) -> None:
        self._stream = stream
        self._consumed = consumed
        self._source = source
        self._limits = limits
        self._given = 0

    def readinto(self, buffer: memoryview, /) -> int:
        """See :class:`Stream`.

        Raises:
            InputError: A bound was met (``E310``, ``E311``).
        """
        number = self._stream.readinto(buffer) or 0
        self._given += number
        check_inflation(self._given, self._consumed(), self._source, self._limits)
        return number


def check_inflation(given: int, consumed: int, source: str, limits: Limits) -> None:
    """Refuse a stream that inflated beyond the limits.

    Raises:
        InputError: Too many bytes (``E310``) or too many for each compressed one (``E311``).
    """
    if given > limits.inflated_bytes:
        raise refuse_size(source, limits.inflated_bytes)
    if given > limits.ratio_from and given > limits.ratio * consumed:
        raise refuse_ratio(source, limits.ratio)


class Front:
    """A stream whose first bytes are known: ``first``."""

    def __init__(self, stream: Stream, number: int = 4) -> None:
        first = bytearray(number)
        filled = 0
        with memoryview(first) as view:
            while filled < len(first) and (number := stream.readinto(view[filled:]) or 0):
                filled += number
        self.first = bytes(first[:filled])
        self._left = self.first
        self._stream = stream

    def readinto(self, buffer: memoryview, /) -> int:
        if not self._left:
            return self._stream.readinto(buffer) or 0
        number = min(len(buffer), len(self._left))
        buffer[:number] = self._left[:number]
        self._left = self._left[number:]
        return number


class _Gzip:
    """gzip members one after the other, zero padding between and behind them passed over."""

    def __init__(self, stream: Stream, source: str, limits: Limits, health: dict[str, int]) -> None:
        self._stream = stream
        self._source = source
        self._limits = limits
        self._health = health
        self._input = memoryview(bytearray(_INPUT))
        self._member = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        self._pending = b""
        self._consumed = 0
        self._given = 0
        self._ended = False

    def readinto(self, buffer: memoryview, /) -> int:
        while not self._ended:
            data = self._inflate(min(len(buffer), _OUTPUT))
            if data:
                self._given += len(data)
                check_inflation(self._given, self._consumed, self._source, self._limits)
                buffer[: len(data)] = data
                return len(data)
        return 0

    def _inflate(self, most: int) -> bytes:
        """The next piece, or nothing where there is none yet."""
        if self._member.eof:
            self._next_member()
            return b""
        fresh: memoryview | bytes = b""
        if self._member.needs_input:
            fresh = self._take()
            if not fresh:
                return self._damaged()
        try:
            return self._member.decompress(fresh, most)
        except _DAMAGED:
            return self._damaged()

    def _take(self) -> memoryview | bytes:
        if self._pending:
            pending, self._pending = self._pending, b""
            return pending
        number = self._stream.readinto(self._input) or 0
        self._consumed += number
        return self._input[:number]

    def _next_member(self) -> None:
        left = bytes(self._member.unused_data)
        while True:
            left = left.lstrip(b"\0")
            if len(left) >= len(GZIP) or not (fresh := self._take()):
                break
            left += fresh
        if left.startswith(GZIP):
            self._member = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
            self._pending = left
            return
        if left:
            beyond = len(left)
            while fresh := self._take():
                beyond += len(fresh)
            count(self._health, "bytes_after_end", beyond)
        self._ended = True

    def _damaged(self) -> bytes:
        count(self._health, "archive_damaged")
        self._ended = True
        return b""


class _Zstandard:
    """Zstandard frames one after the other."""

    def __init__(self, stream: Stream, source: str, limits: Limits, health: dict[str, int]) -> None:
        self._input = _RawReader(stream)
        self._reader = zstandard.ZstdDecompressor().stream_reader(
            cast(IO[bytes], self._input), read_size=_INPUT, read_across_frames=True
        )
        self._source = source
        self._limits = limits
        self._health = health
        self._given = 0
        self._ended = False

    def readinto(self, buffer: memoryview, /) -> int:
        if self._ended:
            return 0
        try:
            number: int = self._reader.readinto(buffer[:_OUTPUT])
        except zstandard.ZstdError:
            count(self._health, "archive_damaged")
            number = 0
        if not number:
            self._ended = True
        self._given += number
        check_inflation(self._given, self._input.consumed, self._source, self._limits)
        return number


class _RawReader(io.RawIOBase):
    """A stream as the kind of file that zstandard wants."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream
        self.consumed = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        number = self._stream.readinto(buffer) or 0
        self.consumed += number
        return number
