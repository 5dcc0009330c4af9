"""All fields of many messages, most of them without walking.

A program writes messages of one kind in few layouts: the same tags in the same places, and numbers
of as many bytes. A layout is learned from one message; a few masked comparisons of eight bytes
tell which others have it, and each of its fields is then one column. What is behind them, and
messages of rarer layouts, are walked (:func:`recompute_scan.trace.perfetto.wire.walk`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from msgspec import Struct

from recompute_scan.arrays import true_at
from recompute_scan.trace.columns import Int64
from recompute_scan.trace.perfetto.wire import (
    LENGTH,
    PADDING,
    VARINT,
    Bytes,
    Fields,
    Heads,
    Spans,
    number_at,
    walk,
)

# A layout is looked for so often, among so many messages at least.
_MOST_LAYOUTS = 8
_FEWEST = 64
# Where a field is in its message: tag, place of the number or length, and bytes of that.
_Field = tuple[int, int, int]
_WORD = _LEAST_TAG = 8
# Tags and lengths of more bytes are of no message that has many like it; and numbers.
_LENGTH_BYTES, _NUMBER_BYTES = 4, 9


class Gathered:
    """All fields of some messages; those of one message are in its own order.

    Args:
        parts: The fields.
        messages: How many messages have them.
    """

    def __init__(self, parts: Iterable[Fields], messages: int) -> None:
        self.messages = messages
        self._parts = list(parts)

    def pick(self, number: int) -> Spans:
        """Those of one number that have a length."""
        found = self._tagged(number << 3 | LENGTH)
        if not found:
            none = np.zeros(0, np.int64)
            return Spans(none, none, none)
        columns = [(each.message, each.start, each.end) for each in found]
        if len(columns) == 1:
            return Spans(*columns[0])
        return Spans(*map(np.concatenate, zip(*columns, strict=True)))

    def numbers(self, number: int, messages: int, default: int = 0) -> Int64:
        """The numbers of one field, one for each message; the last where it is there twice."""
        values = np.full(messages, default, np.int64)
        for mine in self._tagged(number << 3 | VARINT):
            values[mine.message] = mine.value
        return values

    def _tagged(self, tag: int) -> list[Fields]:
        return [mine for part in self._parts if (mine := part.tagged(tag))]


class PackedRun(Struct, frozen=True):
    """What the packets of one run have in common.

    Attributes:
        data: What holds them.
        sequence: The sequence of each packet.
        time: Its time, ns.
        first: Number of the first packet in the file.
        broken: Counts what is no field; see :func:`recompute_scan.trace.perfetto.wire.walk`.
    """

    data: Bytes
    sequence: Int64
    time: Int64
    first: int
    broken: list[int]


def gather(data: Bytes, messages: Spans, broken: list[int]) -> Gathered:
    """All fields of messages that are fields of others."""
    return gather_nested(data, messages.start, messages.end, broken, 0)[0]


def gather_nested(
    data: Bytes, start: Int64, end: Int64, broken: list[int], inside: int
) -> tuple[Gathered, Gathered]:
    """All fields of these messages, and all of the messages in one of the fields.

    Args:
        data: What holds them.
        start: Where each message begins.
        end: Where it ends.
        broken: See :func:`recompute_scan.trace.perfetto.wire.walk`.
        inside: The number of that field; 0 for none. Of two in one message the last counts.
    """
    number = len(start)
    message: Int64 = np.arange(number)
    outer, inner, entered = _fields(data, message, start, end, broken, inside << 3 | LENGTH)
    found = Gathered(outer, number)
    apart = found.pick(inside).last(number)
    if len(apart.message):
        inner += _fields(data, apart.message, apart.start, apart.end, broken, LENGTH)[0]
    return found, Gathered(inner, entered + len(apart.message))


_Rest = list[tuple[Int64, Int64, Int64]]


def _fields(
    data: Bytes, message: Int64, start: Int64, end: Int64, broken: list[int], inside: int
) -> tuple[list[Fields], list[Fields], int]:
    """The fields of messages, those in a last field with this tag, and how many have one."""
    found: tuple[list[Fields], list[Fields]] = [], []
    none = message[:0], start[:0], end[:0]
    behind: tuple[_Rest, _Rest] = [none], [none]
    entered = 0
    heads = data.heads(start)
    for _ in range(_MOST_LAYOUTS):
        number = len(message)
        if number < _FEWEST:
            break
        middle = number // 2
        layout = _Layout(data.raw, int(start[middle]), int(end[middle]), inside)
        mine = layout.find(heads, end - start)
        of, stop = message[mine], end[mine]
        *fields, at = layout.fields(heads.rows(mine), of, start[mine])
        for into, more in zip(found, fields, strict=True):
            into.extend(more)
        entered += len(of) * layout.enters
        going = true_at(at < stop)
        behind[layout.enters].append((of[going], at[going], stop[going]))
        others = np.ones(number, np.bool_)
        others[mine] = False
        kept = true_at(others)
        message, start, end = message[kept], start[kept], end[kept]
        heads = heads.rows(kept)
    behind[0].append((message, start, end))
    for into, rest in zip(found, behind, strict=True):
        message, start, end = map(np.concatenate, zip(*rest, strict=True))
        into.extend(walk(data, message, start, end, broken))
    return *found, entered


class _Layout:
    """How a message begins: numbers, and the first field that has a length.

    Args:
        raw: The bytes.
        start: Where the message begins.
        end: Where it ends.
        inside: The tag of a field that is entered where it is the last one; 0 of none.

    Attributes:
        enters: Whether there is such a field.
    """

    def __init__(self, raw: bytes, start: int, end: int, inside: int) -> None:
        self.enters = False
        self._outer: list[_Field] = []
        self._inner: list[_Field] = []
        self._entered = self._last = (0, 0, 0)
        mask, wanted = bytearray(), bytearray()
        at, most = start, min(end, start + PADDING - _WORD)
        while at < end:
            try:
                tag, body = number_at(raw, at)
                value, after = number_at(raw, body)
            except (IndexError, ValueError):
                break
            long = tag & 7 == LENGTH
            if tag < _LEAST_TAG or tag & 7 not in (VARINT, LENGTH) or after > most:
                break
            if body - at > _LENGTH_BYTES or after - body > (
                _LENGTH_BYTES if long else _NUMBER_BYTES
            ):
                break
            mask += b"\xff" * (body - at) + b"\x80" * (after - body)
            wanted += raw[at:body] + bytes(byte & 0x80 for byte in raw[body:after])
            field = tag, body - start, after - body
            at = after
            if tag == inside and not self.enters and at + value == end:
                self.enters, self._entered = True, field
                continue
            (self._inner if self.enters else self._outer).append(field)
            if long:
                self._last = field
                break
        self._size = len(mask)
        self._words = [
            (place, _word(mask, place), _word(wanted, place))
            for place in range(0, self._size, _WORD)
        ]

    def find(self, heads: Heads, size: Int64) -> Int64:
        """Which messages of these sizes begin like this."""
        found = size >= self._size
        for place, mask, wanted in self._words:
            found &= (heads.words(place) & mask) == wanted
        if self.enters:
            _, place, length = self._entered
            found &= heads.numbers(place, length) == size - (place + length)
        if self._last[0]:
            _, place, length = self._last
            found &= heads.numbers(place, length) <= size - self._size
        return true_at(found)

    def fields(
        self, heads: Heads, message: Int64, start: Int64
    ) -> tuple[list[Fields], list[Fields], Int64]:
        """The fields, those inside, and where what is behind them begins."""
        first = last = start + self._size
        found: tuple[list[Fields], list[Fields]] = [], []
        for fields, into in zip((self._outer, self._inner), found, strict=True):
            for field in fields:
                tag, place, length = field
                value = heads.numbers(place, length)
                if field is self._last:
                    last = first + value
                into.append(Fields(tag, message, value, first, last))
        return *found, last


def _word(data: bytearray, place: int) -> np.uint64:
    word: np.uint64 = np.uint64(int.from_bytes(data[place : place + _WORD], "little"))
    return word
