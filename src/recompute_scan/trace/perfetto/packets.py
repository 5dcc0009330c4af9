"""A stream of bytes to runs of whole packets.

``Trace`` is a row of packets, each with a tag and a length in front (``trace.proto``). Packets that
were compressed together (``compressed_packets``) are taken out here.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import numpy as np

from recompute_scan.arrays import true_at
from recompute_scan.trace.columns import Int64
from recompute_scan.trace.health import count
from recompute_scan.trace.limits import Limits, refuse_event_size, refuse_ratio
from recompute_scan.trace.perfetto.wire import PADDING, Bytes
from recompute_scan.trace.streams import Stream

# The tag of a packet in a trace, and that of what was compressed together in a packet.
PACKET = 0x0A
_COMPRESSED = b"\x92\x03"
CHUNK = 2 << 20
_VARINT = 10
# A packet's tag, its length in one byte or two, and the tag of its time; and the bits of those.
_TIME_FIRST = 0x40
# So few bytes stay in the processor's cache.
_BLOCK = 1 << 17
# So many guesses must be right in a row, as a rule.
_ROW = 4
# Packets taken at once: with their columns, they stay there too, however short they are.
_TOGETHER = 1 << 15
_NONE = np.zeros(0, np.int64)
_BITS, _ONE, _LOW7, _HIGH7 = (np.uint64(n) for n in (8, 1, 0x7F, 0x3F80))
_SHORT, _SHORT_HEAD = np.uint64(0xFF80FF), np.uint64(0x40000A)
_LONG, _LONG_HEAD = np.uint64(0xFF8080FF), np.uint64(0x4000800A)
# First bytes of packets: time, sequence, flags, event, names, trace clock and descriptions (60).
_FIRST = (0x40, 0x50, 0x68, 0x5A, 0x62)
# Those of two bytes: descriptions of tracks, GPU work, compressed packets, clocks, the recording.
_FIRST_PAIRS = tuple(
    bytes([low, high])
    for low, high in (
        *((0xE2, 3), (0xAA, 3), (0x92, 3), (0x8A, 2), (0x82, 2), (0xCA, 2)),
        *((0x9A, 2), (0xA2, 2), (0xDA, 3), (0xD0, 3), (0x9A, 3), (0x8A, 3)),
    )
)


def is_perfetto(head: bytes) -> bool:
    """Whether a file that begins with these bytes (16 or more of them) is a row of packets.

    JSON may begin with the byte that a packet begins with, a line break; what follows it then is
    no length and tag.
    """
    if head[:1] != bytes([PACKET]):
        return False
    _, at = _varint(head, 1)
    return at > 0 and (head[at : at + 1] in map(_byte, _FIRST) or head[at : at + 2] in _FIRST_PAIRS)


class Packets:
    """Reads the packets of one stream, a few MB at a time.

    Args:
        stream: The uncompressed bytes.
        source: The file's name, for messages.
        limits: What is refused.
        health: Counters to add to.
    """

    def __init__(self, stream: Stream, source: str, limits: Limits, health: dict[str, int]) -> None:
        self._stream = stream
        self._source = source
        self._limits = limits
        self._health = health
        self._buffer = bytearray()

    def runs(self) -> Iterator[tuple[Bytes, Int64, Int64]]:
        """Bytes with whole packets in them, and where each packet begins and ends.

        Raises:
            InputError: A packet is longer than an event may be (``E315``), or inflates as no
                trace does (``E311``).
        """
        left = b""
        while True:
            fresh = self._take(max(CHUNK, len(left)))
            raw = b"".join((left, fresh, bytes(PADDING)))
            whole = Bytes(raw)
            tag, start, rest, sound = _split(whole)
            if len(tag):
                yield from self._run(whole, tag, start, rest)
            if not sound:
                count(self._health, "events_dropped")
                return
            left = raw[rest : len(raw) - PADDING]
            if not fresh:
                if left:
                    count(self._health, "cut_short")
                return
            if len(left) > self._limits.event_bytes:
                raise refuse_event_size(self._source, self._limits.event_bytes)

    def _take(self, most: int) -> memoryview:
        if len(self._buffer) < most:
            self._buffer = bytearray(most)
        view = memoryview(self._buffer)[:most]
        filled = 0
        while filled < most and (number := self._stream.readinto(view[filled:]) or 0):
            filled += number
        return view[:filled]

    def _run(
        self, whole: Bytes, tag: Int64, start: Int64, rest: int, inside: bool = False
    ) -> Iterator[tuple[Bytes, Int64, Int64]]:
        raw = whole.raw
        end = np.append(tag[1:], rest)
        pair = whole.words[start] & np.uint64(0xFFFF)
        packed = true_at(pair == np.uint64(int.from_bytes(_COMPRESSED, "little")))
        if not len(packed):
            yield from _in_turn(whole, start, end)
            return
        if inside:  # nobody compresses twice
            count(self._health, "events_dropped", len(packed))
            plain = np.ones(len(tag), np.bool_)
            plain[packed] = False
            yield from _in_turn(whole, start[plain], end[plain])
            return
        # The same packets with what is in the compressed ones in their place.
        pieces: list[bytes] = []
        size = after = 0
        for row in packed.tolist():
            _, at = _varint(raw, int(start[row]) + len(_COMPRESSED))
            pieces += (raw[after : tag[row]], self._inflate(raw[at : int(end[row])]))
            after = int(end[row])
            size += len(pieces[-1])
            if size > self._limits.event_bytes:
                yield from self._inflated(pieces)
                pieces, size = [], 0
        yield from self._inflated([*pieces, raw[after:rest]])

    def _inflated(self, pieces: list[bytes]) -> Iterator[tuple[Bytes, Int64, Int64]]:
        raw = b"".join((*pieces, bytes(PADDING)))
        whole = Bytes(raw)
        tag, start, rest, sound = _split(whole)
        if not sound or rest + PADDING < len(raw):
            count(self._health, "events_dropped")
        if len(tag):
            yield from self._run(whole, tag, start, rest, inside=True)

    def _inflate(self, data: bytes) -> bytes:
        limits = self._limits
        machine = zlib.decompressobj()
        try:
            contents = machine.decompress(data, limits.event_bytes)
        except zlib.error:
            count(self._health, "archive_damaged")
            return b""
        if machine.unconsumed_tail:
            raise refuse_event_size(self._source, limits.event_bytes)
        if len(contents) > limits.ratio_from and len(contents) > limits.ratio * len(data):
            raise refuse_ratio(self._source, limits.ratio)
        return contents


def _in_turn(whole: Bytes, start: Int64, end: Int64) -> Iterator[tuple[Bytes, Int64, Int64]]:
    for first in range(0, len(start), _TOGETHER):
        rows = slice(first, first + _TOGETHER)
        yield whole, start[rows], end[rows]


def _split(data: Bytes) -> tuple[Int64, Int64, int, bool]:
    """Whole packets: their tags, their starts, where the rest begins, whether it is sound."""
    guesses, starts, ends = _guesses(data)
    places = guesses.data
    # Where one does not end at the next.
    borders = [*(true_at(guesses[1:] != ends[:-1]) + 1).tolist(), len(places)]
    if _ROW * len(borders) > len(places):
        places = places[:0]  # one by one is faster
    found = [(_NONE, _NONE)]
    at, end = 0, len(data)
    sound = True
    while at < end and sound:
        first = bisect_left(places, at)
        if first < len(places) and places[first] == at:
            last = borders[bisect_right(borders, first)]
            found.append((guesses[first:last], starts[first:last]))
            at = int(ends[last - 1])
            continue
        until = places[first] if first < len(places) else end
        tags, begins, at, sound = _one_by_one(data.raw, at, until, end)
        found.append((np.array(tags, np.int64), np.array(begins, np.int64)))
        if at < until:
            break
    tag, start = (np.concatenate(column) for column in zip(*found, strict=True))
    return tag, start, at, sound


def _guesses(data: Bytes) -> tuple[Int64, Int64, Int64]:
    """What may be packets that have their time first, as torch writes it: tag, start and end.

    One that another ends at is a packet if that other is.
    """
    blocks = [_candidates(data, begin) for begin in range(0, len(data), _BLOCK)]
    at = np.concatenate([_NONE, *blocks])
    word = data.words[at]
    short = (word & _SHORT) == _SHORT_HEAD
    kept = short | ((word & _LONG) == _LONG_HEAD)
    start = at + 3 - short
    word >>= _BITS
    length = (word & _LOW7) | ((word >> _ONE) & _HIGH7) * ~short
    end = start + length.view(np.int64)
    rows = true_at(kept & (end <= len(data)))
    return at[rows], start[rows], end[rows]


def _candidates(data: Bytes, begin: int) -> Int64:
    """Where, in a block from that place on, a packet's tag may be with that of its time."""
    end = min(begin + _BLOCK, len(data))
    third = data.bytes[begin + 2 : end + 3] == _TIME_FIRST
    tags = data.bytes[begin:end] == PACKET
    tags &= third[:-1] | third[1:]
    return true_at(tags) + begin


def _one_by_one(
    raw: bytes, at: int, until: int, end: int
) -> tuple[list[int], list[int], int, bool]:
    """The packets from one on, up to that place; see :func:`_split`."""
    tags: list[int] = []
    starts: list[int] = []
    while at < until:
        if raw[at] != PACKET:
            return tags, starts, at, False
        length, start = raw[at + 1], at + 2
        if length > 127:
            length, start = _varint(raw, at + 1)
            if start < 0:
                return tags, starts, at, end - at <= _VARINT
        if start + length > end:
            break
        tags.append(at)
        starts.append(start)
        at = start + length
    return tags, starts, at, True


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where what follows it begins; -1 where it does not end."""
    value = 0
    for place, byte in enumerate(data[at : at + _VARINT]):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    return 0, -1


def _byte(number: int) -> bytes:
    return bytes([number])
