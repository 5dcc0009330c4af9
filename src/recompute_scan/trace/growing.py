"""Columns under way, a piece at a time, in as few bytes as their values allow."""

from __future__ import annotations

from typing import Any

import numpy as np

from recompute_scan.trace.columns import Int32, Int64, Ints
from recompute_scan.trace.times import LATEST_US, NO_TIME

# Rows whose times wait as doubles before they become nanoseconds together.
_BLOCK = 1 << 15
_NARROW, _WIDE = 4, 8


class Numbers:
    """A column of whole numbers: of 32 bits until one needs 64, and nothing while all are -1."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._width = _NARROW
        self._rows = 0

    def add(self, packed: bytes, rows: int) -> None:
        """Packed numbers of either width, or nothing for so many times -1."""
        width = len(packed) // rows
        if not packed:
            if self._data:
                self._data += self._nothing(rows)
        else:
            if not self._data:
                self._data += self._nothing(self._rows)
            if width > self._width:
                narrow = np.frombuffer(self._data, np.int32)
                self._data = bytearray(narrow.astype(np.int64))
                self._width = _WIDE
            elif width < self._width:
                packed = np.frombuffer(packed, np.int32).astype(np.int64).tobytes()
            self._data += packed
        self._rows += rows

    def finish(self) -> Ints:
        """The column, which is spent."""
        if not self._data:
            # One number, read as many.
            return np.broadcast_to(np.int32(-1), self._rows)
        if self._width == _NARROW:
            narrow: Int32 = np.frombuffer(self._data, np.int32)
            return narrow
        return np.frombuffer(self._data, np.int64)

    def _nothing(self, rows: int) -> bytes:
        return b"\xff" * (rows * self._width)


class Times:
    """A column of times: doubles in µs that become ns a block at a time, or ns as they are."""

    def __init__(self) -> None:
        self._ns = bytearray()
        self._us = bytearray()

    def add(self, packed: bytes, exact: bool) -> None:
        """Packed doubles in µs; or, where they are exact, whole ns of 64 bits."""
        if exact:
            self._flush()
            self._ns += packed
            return
        self._us += packed
        if len(self._us) >= 8 * _BLOCK:
            self._flush()

    def finish(self) -> Int64:
        """All times in ns, ``NO_TIME`` where there was none; the column is spent."""
        self._flush()
        return np.frombuffer(self._ns, np.int64)

    def _flush(self) -> None:
        if not self._us:
            return
        us: np.ndarray[Any, np.dtype[np.float64]] = np.frombuffer(self._us, np.float64)
        usable = np.abs(us) < LATEST_US
        if not usable.all():
            us = np.where(usable, us, 0.0)
        whole = np.floor(us)
        # In two parts: microseconds since 1970 times 1000 do not fit into a double.
        ns = whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000).astype(np.int64)
        ns[~usable] = NO_TIME
        self._ns += ns.tobytes()
        self._us = bytearray()
