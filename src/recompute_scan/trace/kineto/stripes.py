"""A part of a large plain file's events, packed by whichever process it falls to.

A file is cut into stripes of equal size, one for this process, the next for a second one, and
so on. A stripe ends between two events, at the first separator behind its nominal end, where
the next one begins: both processes find the same place without a word. As with chunks, a stripe
decodes only if it was cut right at both ends; whatever is odd in one (damage, a value that
does not fit, times that need all their digits) ends the sharing there, and the rest is read as
if nothing had been shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import FileIO
from typing import Any

import msgspec

from recompute_scan.trace.kineto.layout import (
    CHUNK,
    CountOf,
    Separator,
    decode_chunk,
    python_frames,
)
from recompute_scan.trace.kineto.packing import MISFIT, Packed, Packer
from recompute_scan.trace.kineto.schema import UNREADABLE, Event, decode_events, is_coarse

# An event that goes on further beyond its stripe ends the sharing.
_OVERHANG = 64 * 1024
# What an odd stripe raises while it is packed.
ODD = (*UNREADABLE, *MISFIT)


class ReadingPlan(msgspec.Struct, frozen=True):
    """How a file is shared.

    Attributes:
        path: The file.
        first: Where its first event begins.
        stripe: Bytes of a stripe.
        stripes: How many stripes are shared; what follows them is not.
        separator: What is between two events.
        python: Whether ``python_function`` events are kept.
    """

    path: str
    first: int
    stripe: int
    stripes: int
    separator: Separator
    python: bool


class Share(msgspec.Struct, array_like=True):
    """What came out of one stripe of the second process.

    Attributes:
        packed: Its events, with that process's own codes.
        names: Names that are new in this stripe, in the order of their codes; so are
            ``threads`` and ``signatures``.
        left_out: Events that were not kept.
        numbered: Events with a number, and how many numbers there were so far.
        after_python: Whether the stripe ends with a Python frame.
    """

    packed: list[Packed]
    names: list[Any]
    threads: list[tuple[Any, Any]]
    signatures: list[bytes]
    left_out: int
    numbered: tuple[int, int]
    after_python: bool


class Stripes:
    """Packs stripes of one file, one at a time.

    Args:
        plan: How the file is shared.
        file: The file, open.
        packer: Numbers names, threads and shapes.
        count_of: The fastest there is here.

    Attributes:
        position: Where in the file the events begin that were not packed yet.
    """

    def __init__(
        self, plan: ReadingPlan, file: FileIO, packer: Packer, count_of: CountOf = bytearray.count
    ) -> None:
        self.position = plan.first
        self._plan = plan
        self._packer = packer
        self._count_of = count_of
        self._data = bytearray(1 + plan.stripe + 2 * _OVERHANG)
        self._file = file

    def begin(self, number: int) -> int:
        """Where a stripe begins in the file.

        Raises:
            ValueError: No event begins near its nominal place.
        """
        nominal = self._plan.first + number * self._plan.stripe
        if number == 0:
            return nominal
        self._file.seek(nominal)
        near = self._file.read(_OVERHANG)
        found = near.find(self._plan.separator.text)
        if found < 0:
            raise ValueError("no separator")
        return nominal + found + self._plan.separator.brace

    def packed(self, number: int) -> Iterator[Packed]:
        """The columns of one stripe's events, chunk by chunk.

        Raises:
            ODD: Something in it is not as it should be.
        """
        begin, end = self.begin(number), self.begin(number + 1)
        self.position = begin
        between = self._plan.separator.brace - self._plan.separator.comma
        # A chunk at a time and always to the same place, which stays in the processor's cache.
        while self.position < end:
            comma = self._fill(end) - between
            yield from self._chunk(comma)
            self.position += comma + between - 1

    def _fill(self, end: int) -> int:
        """Read whole events from the position on; where the next one begins in the buffer."""
        separator, data = self._plan.separator, self._data
        size = CHUNK
        while self.position + size < end:
            self._read(size)
            cut = data.rfind(separator.text, 1, 1 + size)
            if cut >= 0:
                return cut + separator.brace
            size *= 2
        self._read(end - self.position)
        return 1 + end - self.position

    def _read(self, size: int) -> None:
        self._file.seek(self.position)
        filled = 0
        with memoryview(self._data)[1 : 1 + size] as view:
            while filled < size:
                number = self._file.readinto(view[filled:])
                if not number:
                    raise ValueError("the file has become shorter")
                filled += number

    def _chunk(self, comma: int) -> Iterator[Packed]:
        data, first = self._data, 1
        if not self._plan.python:
            frames = python_frames(data, first, comma, self._plan.separator, self._count_of)
            if frames:
                self._packer.pass_over(frames)
                return
        events = decode_chunk(data, first, comma, decode_events)
        if any(is_coarse(event.ts) for event in _ends(events)):
            raise ValueError("times need all their digits")
        packed = self._packer.pack(events, strict=True)
        if packed is not None:
            yield packed


def _ends(events: list[Event]) -> list[Event]:
    return [*events[:1], *events[-1:]]
