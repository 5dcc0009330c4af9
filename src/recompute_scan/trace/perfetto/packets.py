"""A stream of bytes to runs of whole packets.

``Trace`` is a row of packets, each with a tag and a length in front (``trace.proto``). Packets that
were compressed together (``compressed_packets``) are taken out here.
"""

from __future__ import annotations

import zlib
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
CHUNK = 4 << 20
_ALIKE = 64
_TAGS = bytes([PACKET]) * _ALIKE
_VARINT = 10
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
            tags, rest, sound = _split(raw)
            if tags:
                yield from self._run(raw, tags, rest)
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
        self, raw: bytes, tags: list[int], rest: int, inside: bool = False
    ) -> Iterator[tuple[Bytes, Int64, Int64]]:
        whole = Bytes(raw)
        tag = np.array(tags, np.int64)
        _, length = whole.varints(tag + 1)
        start, end = tag + 1 + length, np.append(tag[1:], rest)
        pair = whole.words[start] & np.uint64(0xFFFF)
        packed = true_at(pair == np.uint64(int.from_bytes(_COMPRESSED, "little")))
        if not len(packed):
            yield whole, start, end
            return
        if inside:  # nobody compresses twice
            count(self._health, "events_dropped", len(packed))
            plain = np.ones(len(tag), np.bool_)
            plain[packed] = False
            yield whole, start[plain], end[plain]
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
        tags, rest, sound = _split(raw)
        if not sound or rest + PADDING < len(raw):
            count(self._health, "events_dropped")
        if tags:
            yield from self._run(raw, tags, rest, inside=True)

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


def _split(raw: bytes) -> tuple[list[int], int, bool]:
    """Where each whole packet's tag is, where the rest begins, and whether it is sound.

    Args:
        raw: The bytes, and ``PADDING`` behind them.
    """
    tags: list[int] = []
    note = tags.append
    at, end = 0, len(raw) - PADDING
    before = -1
    while at < end:
        if raw[at] != PACKET:
            return tags, at, False
        # Most lengths have one byte or two.
        length = raw[at + 1]
        first = at + 2
        if length > 127:
            if raw[first] < 128:
                length = length & 127 | raw[first] << 7
                first += 1
            else:
                length, first = _varint(raw, at + 1)
                if first < 0:
                    return tags, at, end - at <= _VARINT
        if first + length > end:
            break
        note(at)
        if length == before < 128:
            # Ends of slices are all alike, so their heads are looked at many at once.
            step = length + 2
            while at + step * (_ALIKE + 1) < end:
                begin, stop = at + step, at + step * (_ALIKE + 1)
                if raw[begin:stop:step] != _TAGS or raw[begin + 1 : stop : step] != (
                    raw[at + 1 : at + 2] * _ALIKE
                ):
                    break
                tags.extend(range(begin, stop, step))
                at = stop - step
            at += step
        else:
            at = first + length
        before = length
    return tags, at, True


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
