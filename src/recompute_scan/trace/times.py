"""A column of times in exact nanoseconds, from microseconds in every form that files have."""

from __future__ import annotations

from typing import Any

import numpy as np

from recompute_scan.trace.columns import Int64
from recompute_scan.trace.schema import Ns

# Below this a double holds nanoseconds; 101 days in µs.
EXACT_US = 2.0**43
# The time of an event that has none.
NO_TIME = int(np.iinfo(np.int64).min)
# No clock goes there: 140 years in µs. Start and end in ns fit into 63 bits below it.
_LATEST_US = 2.0**52
# Rows whose times wait as doubles before they become nanoseconds together.
_BLOCK = 1 << 15


class Times:
    """A column under way: doubles in µs that become ns a block at a time, or ns as they are."""

    def __init__(self) -> None:
        self._ns = bytearray()
        self._us = bytearray()

    def add(self, times: bytes | list[Any]) -> None:
        """Packed doubles in µs, or a list of whole nanoseconds."""
        if isinstance(times, list):
            self._flush()
            self._ns += np.array(times, np.int64).tobytes()
            return
        self._us += times
        if len(self._us) >= 8 * _BLOCK:
            self._flush()

    def finish(self) -> Int64:
        """All times in ns, ``NO_TIME`` where there was none; the column is spent."""
        self._flush()
        return np.frombuffer(self._ns, np.int64)

    def _flush(self) -> None:
        if not self._us:
            return
        us = np.frombuffer(self._us, np.float64)
        usable = np.abs(us) < _LATEST_US
        if not usable.all():
            us = np.where(usable, us, 0.0)
        whole = np.floor(us)
        # In two parts: microseconds since 1970 times 1000 do not fit into a double.
        ns = whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000).astype(np.int64)
        ns[~usable] = NO_TIME
        self._ns += ns.tobytes()
        self._us = bytearray()


def nanoseconds(value: Any) -> int:
    """One time in ns: :class:`Ns` as it is, numbers as µs; ``NO_TIME`` for anything else."""
    if isinstance(value, Ns):
        ns = int(value)
    elif isinstance(value, (int, float)) and abs(value) < _LATEST_US:
        ns = round(value * 1000)  # exact for an int, which most are
    else:
        return NO_TIME
    return ns if abs(ns) < _LATEST_US * 1000 else NO_TIME
