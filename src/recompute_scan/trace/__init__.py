"""Trace readers: files to columns."""

from recompute_scan.trace.columns import DEFAULT_LIMITS, Kind, Limits, Trace
from recompute_scan.trace.health import sentences
from recompute_scan.trace.sources import Address, find, load, name_of, read_beside

__all__ = [
    "DEFAULT_LIMITS",
    "Address",
    "Kind",
    "Limits",
    "Trace",
    "find",
    "load",
    "name_of",
    "read_beside",
    "sentences",
]
