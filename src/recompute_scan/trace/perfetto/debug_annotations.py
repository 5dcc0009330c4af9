"""What is written with an event: numbers, and the shapes of its inputs.

Kineto's ``args`` come as ``debug_annotations``. A name is looked at as two or three numbers of
eight bytes, so those of no use cost next to nothing. Shapes become the text that Kineto's JSON has.
"""

from __future__ import annotations

import numpy as np

from recompute_scan.arrays import true_at
from recompute_scan.trace.columns import Bool, Int64
from recompute_scan.trace.perfetto.wire import (
    Bytes,
    Heads,
    Spans,
    short_varints,
    walk,
)

# The tag of a name in DebugAnnotation, and those of numbers (int, uint).
_NAME = 0x52
_INT, _UINT = 0x20, 0x18
_WORD = 8

NUMBERS = ("Sequence number", "correlation", "stream", "Ev Idx", "device", "bytes")
SHAPES = ("Input Dims", "Input type", "Concrete Inputs")
# What else tells one kind of event from another.
MARKS = ("Record function id", "Fwd thread id", "Python id", "cbid", "cuda_sync_kind", "grid")


class _Key:
    """A name as an annotation has it: tag, length, text, cut into numbers; 24 bytes at most."""

    def __init__(self, name: str) -> None:
        text = bytes([_NAME, len(name)]) + name.encode()
        self.length = len(text)
        self.parts = []
        for place in range(0, len(text), _WORD):
            piece = text[place : place + _WORD]
            mask = (1 << 8 * len(piece)) - 1
            self.parts.append((place, np.uint64(mask), np.uint64(int.from_bytes(piece, "little"))))


def _hint(name: str) -> int:
    """A name's length and first letter, as they are written, as a number."""
    return len(name) | ord(name[0]) << 8


_KEYS = {name: _Key(name) for name in (*NUMBERS, *SHAPES, *MARKS)}
# Hints of the names looked for, each with its own number; 0 for all others.
_HINTS = np.zeros(1 << 16, np.uint8)
_HINTS[[_hint(name) for name in _KEYS]] = np.arange(len(_KEYS)) + 1


class DebugAnnotations:
    """The annotations of some events.

    Args:
        data: What holds them.
        fields: One row for each annotation; ``message`` is the event.
        events: How many events.
    """

    def __init__(self, data: Bytes, fields: Spans, events: int) -> None:
        self._data = data
        self._fields = fields
        self._events = events
        self._name, word = fields.start, data.words[fields.start]
        late = true_at(word.astype(np.uint8) != _NAME)
        self._late = len(late) > 0
        if self._late:
            self._name = _behind_numbers(data, fields, late)
            word = data.words[self._name]
        self._hints = _HINTS.take((word >> np.uint64(8)).astype(np.uint16))

    def has(self, name: str, sure: Bool | None = None) -> Bool:
        """For each event, whether it has an annotation of this name, or is sure to count."""
        found = np.zeros(self._events, np.bool_) if sure is None else sure.copy()
        if not found.all():
            rows, _, _ = self._find(name)
            found[self._fields.message[rows]] = True
        return found

    def numbers(self, name: str) -> Int64:
        """For each event, the number of this name, -1 where there is none."""
        found = np.full(self._events, -1, np.int64)
        rows, at, heads = self._find(name)
        end = self._fields.end[rows]
        place = _KEYS[name].length
        at += place
        if self._late:
            start = self._fields.start[rows]
            at = np.where(at - start == place, at, start)
            heads, place = self._data.heads(at), 0
        tag = heads.numbers(place, 1)
        value, length = short_varints(heads.words(place + 1))
        longer = true_at(length == 0)
        sound = (tag == _INT) | (tag == _UINT)
        values = value.view(np.int64)
        if len(longer):
            values[longer], length[longer] = self._data.varints(at[longer] + 1)
        sound = true_at(sound & (at + length < end))
        found[self._fields.message[rows[sound]]] = values[sound]
        return found

    def spans(self, name: str) -> tuple[Int64, Int64]:
        """For each event, where the value of this name begins and ends; 0 where there is none."""
        start, end = np.zeros(self._events, np.int64), np.zeros(self._events, np.int64)
        rows, at, _ = self._find(name)
        message = self._fields.message[rows]
        start[message], end[message] = at + _KEYS[name].length, self._fields.end[rows]
        return start, end

    def _find(self, name: str) -> tuple[Int64, Int64, Heads]:
        """Those of this name: which they are, where the name is, and what is there."""
        key = _KEYS[name]
        rows = true_at(self._hints == _HINTS[_hint(name)])
        at = self._name[rows]
        heads = self._data.heads(at)
        fits = at + key.length <= self._fields.end[rows]
        for place, mask, wanted in key.parts:
            fits &= (heads.words(place) & mask) == wanted
        if not fits.all():
            kept = true_at(fits)
            rows, at, heads = rows[kept], at[kept], heads.rows(kept)
        return rows, at, heads


def _behind_numbers(data: Bytes, fields: Spans, late: Int64) -> Int64:
    """Where the names of these annotations are: behind the number, as protobuf orders fields."""
    at = np.copy(fields.start)
    for first in walk(data, late, at[late], fields.end[late], [0]):
        at[first.message] = first.end
        break
    return at
