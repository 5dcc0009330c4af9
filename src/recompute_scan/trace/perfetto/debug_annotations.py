"""What is written with an event: numbers, and the shapes of its inputs.

Kineto's ``args`` come as ``debug_annotations``. A name is looked at as two or three numbers of
eight bytes, so those of no use cost next to nothing. Shapes become the text that Kineto's JSON has.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from recompute_scan.arrays import true_at
from recompute_scan.trace.columns import Bool, Int64
from recompute_scan.trace.perfetto.wire import (
    FIXED64,
    LENGTH,
    VARINT,
    Bytes,
    Fields,
    number_at,
    walk,
)

# The tag of a name in DebugAnnotation, and those of numbers (int, uint).
_NAME = 0x52
_NUMBERS = (0x20, 0x18)
_BOOL, _UINT, _INT, _DOUBLE, _STRING, _ELEMENT = 2, 3, 4, 5, 6, 12
_DOUBLES = struct.Struct("<d")
_DEPTH = 32
_WORD = 8

NUMBERS = ("Sequence number", "correlation", "stream", "Ev Idx", "device", "bytes")
SHAPES = ("Input Dims", "Input type", "Concrete Inputs")
# What else tells one kind of event from another.
MARKS = ("Record function id", "Fwd thread id", "Python id", "cbid", "cuda_sync_kind", "grid")


class _Key:
    """A name as an annotation has it: tag, length, text, cut into numbers."""

    def __init__(self, name: str) -> None:
        text = bytes([_NAME, len(name)]) + name.encode()
        self.length = len(text)
        self.parts = []
        for place in range(0, len(text), _WORD):
            piece = text[place : place + _WORD]
            mask = (1 << 8 * len(piece)) - 1
            self.parts.append((place, np.uint64(mask), np.uint64(int.from_bytes(piece, "little"))))

    def find(self, data: Bytes, start: Int64, first: Any) -> Int64:
        """Which of the annotations have this name."""
        (_, mask, wanted), *rest = self.parts
        rows: Int64 = true_at((first & mask) == wanted)
        for place, mask, wanted in rest:
            at = np.minimum(start[rows] + place, len(data))
            rows = rows[(data.words[at] & mask) == wanted]
        return rows


_KEYS = {name: _Key(name) for name in (*NUMBERS, *SHAPES, *MARKS)}


class DebugAnnotations:
    """The annotations of some events.

    Args:
        data: What holds them.
        fields: One row for each annotation; ``message`` is the event.
        events: How many events.
    """

    def __init__(self, data: Bytes, fields: Fields, events: int) -> None:
        self._data = data
        self._fields = fields
        self._events = events
        self._name = _name_starts(data, fields)
        self._first = data.words[self._name]

    def has(self, name: str) -> Bool:
        """For each event, whether it has an annotation of this name."""
        found = np.zeros(self._events, np.bool_)
        found[self._fields.message[self._rows(name)]] = True
        return found

    def numbers(self, name: str) -> Int64:
        """For each event, the number of this name, -1 where there is none."""
        found = np.full(self._events, -1, np.int64)
        rows = self._rows(name)
        behind = self._name[rows] + _KEYS[name].length
        at = np.where(
            self._name[rows] == self._fields.start[rows], behind, self._fields.start[rows]
        )
        tags = self._data.bytes[np.minimum(at, len(self._data))]
        sound = (at < self._fields.end[rows]) & np.isin(tags, _NUMBERS)
        rows, at = rows[sound], at[sound] + 1
        value, length = self._data.varints(at)
        sound = at + length <= self._fields.end[rows]
        found[self._fields.message[rows[sound]]] = value[sound]
        return found

    def spans(self, name: str) -> tuple[Int64, Int64]:
        """For each event, where the value of this name begins and ends; 0 where there is none."""
        start, end = np.zeros(self._events, np.int64), np.zeros(self._events, np.int64)
        rows = self._rows(name)
        message = self._fields.message[rows]
        start[message] = self._name[rows] + _KEYS[name].length
        end[message] = self._fields.end[rows]
        return start, end

    def _rows(self, name: str) -> Int64:
        key = _KEYS[name]
        rows = key.find(self._data, self._name, self._first)
        fits = self._name[rows] + key.length <= self._fields.end[rows]
        kept: Int64 = rows[fits]
        return kept


def _name_starts(data: Bytes, fields: Fields) -> Int64:
    """Where each annotation's name is: in front, or behind its number, as protobuf orders them."""
    at: Int64 = fields.start
    late = true_at(data.bytes[at] != _NAME)
    if not len(late):
        return at
    at = np.copy(at)
    for first in walk(data, at[late], fields.end[late], [0]):
        at[late[first.message]] = first.end
        break
    return at


def json_text(value: bytes) -> bytes:
    """An annotation's value, without its name, as Kineto's JSON has it; empty where it is broken.

    An array without elements is written as nothing at all, so nothing is one.
    """
    try:
        return json.dumps(_value(value, _DEPTH), ensure_ascii=False).encode(errors="replace")
    except (ValueError, IndexError):
        return b""


def _value(data: bytes, depth: int) -> Any:
    """The value in a DebugAnnotation, which is small: one field after the other.

    Raises:
        ValueError: It is nested too deep, or has a field of no use here.
        IndexError: It ends in the middle of a field.
    """
    if not depth:
        raise ValueError("nested too deep")
    elements: list[Any] = []
    at = 0
    while at < len(data):
        tag, at = number_at(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == FIXED64 and number == _DOUBLE:
            (value,) = _DOUBLES.unpack(data[at : at + 8].ljust(8, b"\0"))
            return value
        value, at = number_at(data, at)
        if wire == VARINT and number in (_INT, _UINT, _BOOL):
            if number == _BOOL:
                return bool(value)
            return value - (1 << 64) if number == _INT and value >> 63 else value
        if wire != LENGTH or at + value > len(data):
            raise ValueError("not a value")
        piece, at = data[at : at + value], at + value
        if number == _STRING:
            return piece.decode(errors="replace")
        if number != _ELEMENT:
            raise ValueError("not a value")
        elements.append(_value(piece, depth - 1))
    return elements
