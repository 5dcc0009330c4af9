"""Protocol buffers, a column at a time: one field of many messages in each step.

A message is a run of fields: a tag (field number and wire type), then a number or a length and so
many bytes (https://protobuf.dev/programming-guides/encoding/). Messages of one kind are walked
together: the first field of all of them, then the second of those that have one. So the cost is a
few array operations for each place in a message, and none for each message.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from recompute_scan.arrays import true_at
from recompute_scan.trace.columns import Int64

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
# Bytes of no meaning behind the data: at its end as many are read at once as elsewhere.
PADDING = 40
# A message with more fields than any that is used has is not walked to its end.
_MOST_FIELDS = 4096
_LONGEST_VARINT = 10
_WORD = 8
# No file is as long.
_NOWHERE = 1 << 48

_UInt64 = npt.NDArray[np.uint64]
_SEVENS = np.uint64(7 * _WORD)
_LEAST_TAG = 8
# Tags of fields with a length that have one byte.
_ONE_BYTE_TAGS = range(_LEAST_TAG + LENGTH, 128, 8)
# The bits of a wire type that is neither of a number nor of a length, and what each is long.
_NO_VARINT = 5
_FIXED_SIZES = np.full(8, _NOWHERE)
_FIXED_SIZES[[FIXED64, FIXED32]] = 8, 4
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
        self._heads = np.ndarray((len(self) + 1,), f"V{PADDING}", self.raw, strides=(1,))

    def __len__(self) -> int:
        return len(self.raw) - PADDING

    def varints(self, at: Int64) -> tuple[Int64, Int64]:
        """The numbers that begin at these places, and how many bytes each has.

        Numbers of 64 bits come as the signed ones of the same bits. A number that does not end
        has a length of 11.
        """
        value, length = short_varints(self.words[at])
        more = true_at(length == 0)
        if len(more):
            ninth, tenth = (self.bytes[at[more] + n].astype(np.uint64) for n in (8, 9))
            goes_on = ninth >= 128
            value[more] |= (ninth & np.uint64(127)) << np.uint64(56)
            value[more] |= np.where(goes_on, tenth << np.uint64(63), np.uint64(0))
            length[more] = np.where(goes_on, np.where(tenth < 128, 10, 11), 9)
        return value.view(np.int64), length

    def heads(self, at: Int64) -> Heads:
        """What is at these places."""
        return Heads(self._heads[at])


def short_varints(word: _UInt64) -> tuple[_UInt64, Int64]:
    """The numbers that eight bytes begin with, and how many they have: 0 where more."""
    ends = ~word & _HIGH
    first = ends & (~ends + np.uint64(1))
    value = _sevens(word & ((first << np.uint64(1)) - np.uint64(1)) & _LOW7, _WORD)
    return value, (((first >> np.uint64(7)) * _LENGTHS) >> np.uint64(56)).astype(np.int64)


class Heads:
    """Pieces of :data:`PADDING` bytes, each copied in one go.

    Looking at one place in all of them then takes a tenth of looking it up in the data.

    Args:
        pieces: One void each.
    """

    def __init__(self, pieces: npt.NDArray[np.void]) -> None:
        self._pieces = pieces
        self._bytes = pieces.view(np.uint8).reshape(-1, PADDING)

    def rows(self, kept: Int64) -> Heads:
        """Some of them."""
        return Heads(self._pieces[kept])

    def words(self, place: int) -> _UInt64:
        """Eight bytes of each, from one place on, as a number."""
        words: _UInt64 = self._bytes[:, place : place + _WORD].view("<u8")[:, 0]
        return words

    def numbers(self, place: int, length: int) -> Int64:
        """The numbers at one place, each of so many bytes, nine at most."""
        if length == 1:
            return self._bytes[:, place].astype(np.int64)
        kept = np.uint64((1 << 8 * min(length, _WORD)) - 1) & _LOW7
        value = _sevens(self.words(place) & kept, length)
        if length > _WORD:
            value |= self.numbers(place + _WORD, 1).view(np.uint64) << _SEVENS
        return value.view(np.int64)


def _sevens(value: _UInt64, length: int) -> _UInt64:
    """Numbers of up to so many bytes that have seven bits each, without the gaps; in place."""
    for low, high, shift in _HALVES[: (length - 1).bit_length()]:
        upper = value & high
        upper >>= shift
        value &= low
        value |= upper
    return value


class Fields(Struct, frozen=True):
    """One field each of some messages.

    Attributes:
        tag: The field's number and its wire type, as they are written; one for all or one each.
        message: Which message it is of.
        value: The number, or the length.
        start: Where the bytes of a field with a length begin; of others, nothing that counts.
        end: Where they end.
    """

    tag: Int64 | int
    message: Int64
    value: Int64
    start: Int64
    end: Int64

    def tagged(self, tag: int) -> Fields | None:
        """Those with this tag; ``None`` where there are none."""
        if isinstance(self.tag, int):
            return self if self.tag == tag else None
        mine = true_at(self.tag == tag)
        columns = (self.message, self.value, self.start, self.end)
        return Fields(tag, *(column[mine] for column in columns)) if len(mine) else None


class Spans(Struct, frozen=True):
    """Fields with a length.

    Attributes:
        message: Which message each is of.
        start: Where its bytes begin.
        end: Where they end.
    """

    message: Int64
    start: Int64
    end: Int64

    def rows(self, kept: Int64) -> Spans:
        """Some of the fields."""
        return Spans(self.message[kept], self.start[kept], self.end[kept])

    def last(self, messages: int) -> Spans:
        """The last of each of so many messages, in the order of the messages."""
        place = np.full(messages, -1)
        place[self.message] = np.arange(len(self.message))
        return self.rows(place[place >= 0])

    def each(self) -> Iterator[tuple[int, int, int]]:
        """Message, start and end of one after the other."""
        return zip(self.message.tolist(), self.start.tolist(), self.end.tolist(), strict=True)


def walk(data: Bytes, message: Int64, at: Int64, end: Int64, broken: list[int]) -> Iterator[Fields]:
    """The fields of many messages: the first of each, then the second, and so on.

    Args:
        data: What holds them.
        message: Number of each message.
        at: Where each begins.
        end: Where it ends.
        broken: How many messages ended in something that is no field is added to the first entry.
    """
    for _ in range(_MOST_FIELDS):
        going = at < end
        if not going.all():
            rows = true_at(going)
            message, at, end = message[rows], at[rows], end[rows]
        if not len(at):
            return
        tag, value, first, last = _fields_at(data, at)
        sound = last <= end
        if not sound.all():
            rows = true_at(sound)
            broken[0] += len(sound) - len(rows)
            message, value, first, last, end = (
                column[rows] for column in (message, value, first, last, end)
            )
            tag = tag if isinstance(tag, int) else tag[rows]
        yield Fields(tag, message, value, first, last)
        at = last
    broken[0] += len(at)


def _fields_at(data: Bytes, at: Int64) -> tuple[Int64 | int, Int64, Int64, Int64]:
    """Tags, values, where their bytes begin and end: at :data:`_NOWHERE` for what is no field.

    Of fields that all have the same tag and a length, the tag alone.
    """
    body = at + 1
    first = at + 2
    tags, values = data.bytes[at], data.bytes[body]
    value: Int64 = values.astype(np.int64)
    # Nearly all tags and lengths have one byte.
    longer = true_at(tags | values >= 128)
    one = int(tags[0])
    if one in _ONE_BYTE_TAGS and (tags == one).all():
        if len(longer):
            _, _, value[longer], first[longer] = _longer(data, at[longer])
        return one, value, first, first + value
    tag: Int64 = tags.astype(np.int64)
    if len(longer):
        tag[longer], body[longer], value[longer], first[longer] = _longer(data, at[longer])
    wire = tag & 7
    last = first + value * (wire == LENGTH)
    fixed = true_at((wire & _NO_VARINT) != 0)
    if len(fixed):
        last[fixed] = body[fixed] + _FIXED_SIZES[wire[fixed]]
    last[tag < _LEAST_TAG] = _NOWHERE
    return tag, value, first, last


def _longer(data: Bytes, at: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    """Tags, where they end, the values behind them and where those end."""
    tag, length = data.varints(at)
    tag[length > _LONGEST_VARINT] = 0
    body = at + length
    value, length = data.varints(np.minimum(body, len(data)))
    first = body + length
    wild = (tag & 7 == LENGTH) & ((value < 0) | (value >= _NOWHERE))
    wild |= length > _LONGEST_VARINT
    first[wild], value[wild] = _NOWHERE, 0
    return tag, body, value, first


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
