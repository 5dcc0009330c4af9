"""What a database holds: whether Nsight Systems exported it, and what was recorded into it.

An export has tables for what was recorded, and for nothing else. One of a recording without CUDA
and NVTX is an export all the same, so it is told by the tables that every export has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from recompute_scan.errors import InputError
from recompute_scan.trace.nsys.database import UNREADABLE, Database
from recompute_scan.trace.nsys.rows import EVENT_TABLES, STRINGS

# What `nsys export` writes of any recording, since which of them depends on its version.
_OF_EVERY_EXPORT = (
    "META_DATA_EXPORT",
    "EXPORT_META_DATA",
    "TARGET_INFO_SESSION_START_TIME",
    "TARGET_INFO_SYSTEM_ENV",
    "ANALYSIS_DETAILS",
    "ProcessStreams",
)
# What else a recording may hold, in words.
_OTHERWISE = (
    ("OSRT_API", "calls into the operating system"),
    ("SCHED_EVENTS", "switches of threads"),
    ("COMPOSITE_EVENTS", "samples of the CPU"),
    ("MPI_P2P_EVENTS", "MPI"),
)
# Databases that people take for an export, by one of their tables.
_OTHERS = (
    ("read_only_op_instances", "it is DLProf's own database; the export of nsys lies beside it"),
    ("rocpd_kernel_dispatch", "it is rocprofv3's database (rocpd)"),
    ("rocpd_op", "it is a database of AMD's RPD tracer"),
    ("CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL", "it is a database of nvprof"),
)
# The second is that of nsys 2022 and before.
_VERSION_TABLES = ("META_DATA_EXPORT", "EXPORT_META_DATA")
_MOST_ROWS = 1000
_VERSION = re.compile(r"\d{4}(?:\.\d+){1,3}")
_RECORD = (
    "record with `nsys profile --trace=cuda,nvtx --pytorch=autograd-shapes-nvtx`, and export again"
)


def check_holds(database: Database, path: Path) -> None:
    """Refuse a database without anything that could be read.

    Raises:
        InputError: It is no export of Nsight Systems (``E321``), or one without CUDA and NVTX
            (``E322``).
        sqlite3.Error: The schema cannot be read.
    """
    known = any(database.columns(table) for table in EVENT_TABLES)
    named = {"id", "value"} <= database.columns(STRINGS)
    if known and named:
        return
    if named and any(database.columns(table) for table in _OF_EVERY_EXPORT):
        held = [what for table, what in _OTHERWISE if database.columns(table)]
        raise InputError(
            "E322",
            f"{path} is an export of Nsight Systems without CUDA or NVTX.",
            why=f"it holds {_joined(held)} only" if held else "nothing was recorded into it",
            hint=_RECORD,
        )
    other = next((what for table, what in _OTHERS if database.columns(table)), None)
    raise InputError(
        "E321",
        f"{path} is an SQLite database, but no export of Nsight Systems.",
        why=other or f"it has no table {STRINGS if known else EVENT_TABLES[0]}",
        hint="make one with `nsys export --type sqlite report.nsys-rep`",
    )


def refuse_empty(path: Path) -> InputError:
    """``E322``: the tables are there, and not one event is in them."""
    return InputError(
        "E322",
        f"{path} holds no events.",
        why="its tables of kernels, CUDA calls and NVTX ranges are empty or missing",
        hint=_RECORD,
    )


def version_of(database: Database) -> str:
    """The version of nsys that wrote the export, such as ``2026.2.1.210``; empty if not told."""
    for table in _VERSION_TABLES:
        try:
            rows = _columns(database, table)
        except UNREADABLE:
            continue
        for name, value in rows:
            if name == "EXPORT_PRODUCT_VERSION" and _VERSION.fullmatch(value):
                return value
    return ""


def _columns(database: Database, table: str) -> list[tuple[str, str]]:
    name, value = (_column(database, table, which) for which in ("name", "value"))
    return list(zip(name, value, strict=False))


def _column(database: Database, table: str, name: str) -> Iterator[str]:
    """A column's texts, of no more rows than such a table can have."""
    texts = (text for _, block in database.texts(table, (), name) for text in block)
    return ((text or b"").decode(errors="replace") for text in islice(texts, _MOST_ROWS))


def _joined(words: list[str]) -> str:
    return " and ".join((", ".join(words[:-1]), words[-1])) if words[1:] else words[0]
