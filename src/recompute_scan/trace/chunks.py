"""Chunks of whole events in a buffer: cut, passed over, or decoded where they lie."""

from __future__ import annotations

from collections.abc import Callable

from recompute_scan.trace.layout import Separator
from recompute_scan.trace.schema import Decode, Event

# Bytes to decode at once; larger ones cost more in page faults.
CHUNK = 256 * 1024
_LOOKED_AT = 256
# How often one byte stands in a part of a buffer, as `bytearray.count` tells.
CountOf = Callable[[bytearray, bytes, int, int], int]


def decoded(data: bytearray, first: int, comma: int, decode: Decode) -> list[Event]:
    """The events from ``first`` to the comma that follows them, decoded as an array.

    The byte before ``first`` and the comma are an array's brackets meanwhile. They decode only
    if both places stand between two events.

    Raises:
        UNREADABLE: They do not decode.
    """
    before = data[first - 1], data[comma]
    data[first - 1], data[comma] = b"[]"
    try:
        with memoryview(data) as view:
            return decode(view[first - 1 : comma + 1])
    finally:
        data[first - 1], data[comma] = before


def python_frames(
    data: bytearray, first: int, comma: int, separator: Separator, count_of: CountOf
) -> int:
    """How many events the chunk has if all are Python frames, else 0.

    It must have twice as many opening braces as frames: a frame and its args take one each, and
    an event that opens unlike its neighbours, which the count of separators misses, would add one.
    """
    if data.find(separator.python, first, first + _LOOKED_AT) < 0:
        return 0
    frames = data.count(separator.python, first, comma)
    if data.count(separator.short, first, comma) != frames - 1:
        return 0
    return frames if count_of(data, b"{", first, comma) == 2 * frames else 0
