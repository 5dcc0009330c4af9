"""Times in exact nanoseconds, from microseconds in every form that files have."""

from __future__ import annotations

from typing import Any

from recompute_scan.trace.schema import Ns

# Below this a double holds nanoseconds; 101 days in µs.
EXACT_US = 2.0**43
# The time of an event that has none: the lowest number of 64 bits.
NO_TIME = -(2**63)
# No clock goes there: 140 years in µs. Start and end in ns fit into 63 bits below it.
LATEST_US = 2.0**52


def is_coarse(ts: Any) -> bool:
    """Whether a time in µs may have lost its nanoseconds when it became a double."""
    return isinstance(ts, float) and ts > EXACT_US


def nanoseconds(value: Any) -> int:
    """One time in ns: :class:`Ns` as it is, numbers as µs; ``NO_TIME`` for anything else."""
    if isinstance(value, Ns):
        ns = int(value)
    elif isinstance(value, (int, float)) and abs(value) < LATEST_US:
        ns = round(value * 1000)  # exact for an int, which most are
    else:
        return NO_TIME
    return ns if abs(ns) < LATEST_US * 1000 else NO_TIME
