"""Traces in: files to columns. Nothing above this package knows a file format.

Its modules are loaded when they are used: the second process that reads large files needs few.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recompute_scan.trace.columns import Kind, Trace
    from recompute_scan.trace.health import sentences
    from recompute_scan.trace.limits import DEFAULT_LIMITS, Limits
    from recompute_scan.trace.sources import Address, find, load, name_of
    from recompute_scan.trace.store import read_beside

_WHERE = {
    "Address": "sources",
    "DEFAULT_LIMITS": "limits",
    "Kind": "columns",
    "Limits": "limits",
    "Trace": "columns",
    "find": "sources",
    "load": "sources",
    "name_of": "sources",
    "read_beside": "store",
    "sentences": "health",
}

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


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
