"""Protocol buffers, a column at a time: one field of many messages in each step.

A message is a run of fields: a tag (field number and wire type), then a number or a length and so
many bytes (https://protobuf.dev/programming-guides/encoding/). Messages of one kind are walked
together: the first field of all of them, then the second of those that have one. So the cost is a
few array operations for each place in a message, and none for each message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from recompute_scan.arrays import true_at
from recompute_scan.trace.columns import Int64

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
# Bytes of no meaning behind the data: fields at its end are read eight bytes at a time.
PADDING = 24
# A message with more fields than any that is used has is not walked to its end.
_MOST_FIELDS = 4096
_LONGEST_VARINT = 10

_UInt64 = npt.NDArray[np.uint64]
_HIGH, _LOW7 = np.uint64(0x8080808080808080), np.uint64(0x7F7F7F7F7F7F7F7F)
# Of a single bit at 8k in the factor's place: k + 1 in the highest byte of the product.
_LENGTHS = np.uint64(0x0102030405060708)
_HALVES = tuple(
    (np.uint64(low), np.uint64(high), np.uint64(shift))
    for low, high, shift in (
        (0x007F007F007F007F, 0x7F007F007F007F00, 1),
        (0x00003FFF00003FFF, 0x3FFF00003FFF0000, 2),
        (0x000000000FFFFFFF, 0x0FFFFFFF00000000, 4),
    )
)


class Bytes:
    """Bytes that can be looked at by many places at once.

    Args:
        raw: The bytes, and :data:`PADDING` behind them.
    """

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self.raw, np.uint8)
        # The eight bytes from each place on, as one number.
        self.words: _UInt64 = np.ndarray((len(self.raw) - 7,), "<u8", self.raw, strides=(1,))

    def __len__(self) -> int:
        return len(self.raw) - PADDING

    def varints(self, at: Int64) -> tuple[Int64, Int64]:
        """The numbers that begin at these places, and how many bytes each has.

        Numbers of 64 bits come as the signed ones of the same bits. A number that does not end
        has a length of 11.
        """
        value: Int64 = self.bytes[at].astype(np.int64)
        length = np.ones(len(at), np.int64)
        more = true_at(value >= 128)
        if len(more):
            value[more], length[more] = self._long(at[more])
        return value, length

    def _long(self, at: Int64) -> tuple[Int64, Int64]:
        word = self.words[at]
        ends = ~word & _HIGH
        first = ends & (~ends + np.uint64(1))
        value = word & ((first << np.uint64(1)) - np.uint64(1)) & _LOW7
        for low, high, shift in _HALVES:
            value = (value & low) | ((value & high) >> shift)
        length = (((first >> np.uint64(7)) * _LENGTHS) >> np.uint64(56)).astype(np.int64)
        if (length == 0).any():
            more = true_at(length == 0)
            ninth, tenth = (self.bytes[at[more] + n].astype(np.uint64) for n in (8, 9))
            goes_on = ninth >= 128
            value[more] |= (ninth & np.uint64(127)) << np.uint64(56)
            value[more] |= np.where(goes_on, tenth << np.uint64(63), np.uint64(0))
            length[more] = np.where(goes_on, np.where(tenth < 128, 10, 11), 9)
        return value.view(np.int64), length


class Fields(Struct, frozen=True):
    """One field each of some messages.

    Attributes:
        message: Which message it is of.
        tag: The field's number and its wire type, as they are written.
        value: The number, or the length.
        start: Where the bytes of a field with a length begin.
        end: Where they end.
    """

    message: Int64
    tag: Int64
    value: Int64
    start: Int64
    end: Int64

    def rows(self, kept: Int64) -> Fields:
        """Some of the fields."""
        return Fields(*(getattr(self, name)[kept] for name in self.__struct_fields__))


class Gathered:
    """All fields of some messages: the first of each, then the second, and so on."""

    def __init__(self, parts: Iterable[Fields]) -> None:
        self._parts = list(parts)

    def pick(self, number: int, wire: int) -> Fields:
        """Those of one number; of another wire type than it should have, none."""
        tag = number << 3 | wire
        found = []
        for part in self._parts:
            mine = true_at(part.tag == tag)
            if len(mine) == len(part.tag):
                found.append(part)
            elif len(mine):
                found.append(part.rows(mine))
        if not found:
            none = np.zeros(0, np.int64)
            return Fields(none, none, none, none, none)
        if len(found) == 1:
            return found[0]
        columns = ([getattr(each, name) for each in found] for name in Fields.__struct_fields__)
        return Fields(*map(np.concatenate, columns))

    def numbers(self, number: int, messages: int, default: int = 0) -> Int64:
        """The numbers of one field, one for each message; the last where it is there twice."""
        values = np.full(messages, default, np.int64)
        for part in self._parts:
            mine = true_at(part.tag == number << 3 | VARINT)
            values[part.message[mine]] = part.value[mine]
        return values


def walk(data: Bytes, start: Int64, end: Int64, broken: list[int]) -> Iterator[Fields]:
    """The fields of many messages: the first of each, then the second, and so on.

    Args:
        data: What holds them.
        start: Where each message begins.
        end: Where it ends.
        broken: How many messages ended in something that is no field is added to the first entry.
    """
    message: Any = np.arange(len(start))
    at = start
    for _ in range(_MOST_FIELDS):
        going = at < end
        if not going.all():
            message, at, end = message[going], at[going], end[going]
        if not len(at):
            return
        tag, tag_length = data.varints(at)
        wire = tag & 7
        body = at + tag_length
        value, length = data.varints(np.minimum(body, len(data)))
        numeric = wire == VARINT
        lengthy = wire == LENGTH
        first = body + length * lengthy
        last = first + np.where(lengthy, value, length)
        fixed = ~(numeric | lengthy)
        if fixed.any():
            size = np.where(wire == FIXED64, 8, np.where(wire == FIXED32, 4, -1))
            last = np.where(fixed, np.where(size > 0, body + size, -1), last)
        sound = (last <= end) & (last > at) & (tag > 7) & (tag_length <= _LONGEST_VARINT)
        sound &= (length <= _LONGEST_VARINT) | fixed
        sound &= (value >= 0) | ~lengthy
        if not sound.all():
            broken[0] += int((~sound).sum())
            message, tag, value, first, last, end = (
                column[sound] for column in (message, tag, value, first, last, end)
            )
        yield Fields(message, tag, value, first, last)
        at = last
    broken[0] += len(at)


class PackedRun(Struct, frozen=True):
    """What the packets of one run have in common.

    Attributes:
        data: What holds them.
        sequence: The sequence of each packet.
        time: Its time, ns.
        first: Number of the first packet in the file.
        broken: Counts what is no field; see :func:`walk`.
    """

    data: Bytes
    sequence: Int64
    time: Int64
    first: int
    broken: list[int]

    def gather(self, messages: Fields) -> Gathered:
        """All fields of messages that are fields of the packets."""
        return gather(self.data, messages.start, messages.end, self.broken)


def gather(data: Bytes, start: Int64, end: Int64, broken: list[int]) -> Gathered:
    """All fields of these messages; the arguments are those of :func:`walk`."""
    return Gathered(walk(data, start, end, broken))


def number_at(data: bytes, at: int) -> tuple[int, int]:
    """One number, and where what follows it begins.

    Raises:
        IndexError: The bytes end before it does.
        ValueError: It has more bytes than a number has.
    """
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value & (1 << 64) - 1, at
        shift += 7
        if shift > 63:
            raise ValueError("a number without an end")
