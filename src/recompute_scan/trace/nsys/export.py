"""Nsight Systems' SQLite export (``nsys export --type sqlite``): the second source of traces.

Kernels and the calls that launched them are always there, tied by ``correlationId``. Operators
are only where the training script ran under ``torch.autograd.profiler.emit_nvtx``, see
:mod:`recompute_scan.trace.nsys.rows`. Times are whole nanoseconds. ``globalTid`` and
``globalPid`` hold the thread in 24 bits, the process in the next 24, and machine numbers above
(``nsys-exporter/examples.html`` of NVIDIA's documentation, "Serialized process and thread
identifiers").

An export has tables for what was recorded, and for nothing else. One of a recording without CUDA
and NVTX is an export all the same, so it is told by the tables that every export has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from recompute_scan.errors import InputError
from recompute_scan.trace.columns import DEFAULT_LIMITS, Int32, Kind, Limits, Trace
from recompute_scan.trace.nsys.rows import (
    EVENT_TABLES,
    STRINGS,
    UNKNOWN,
    UNREADABLE,
    Database,
    EventRows,
    Export,
    open_database,
    read_tables,
)

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
_LOW_24 = (1 << 24) - 1
_LOW_32 = (1 << 32) - 1


def load_nsys(path: Path, limits: Limits = DEFAULT_LIMITS) -> Trace:
    """The trace in an SQLite file that ``nsys export`` wrote.

    Of a recording of several processes, the one with the most operators is read (without any,
    the one with the most device work); what the others hold is counted in ``health``.

    Args:
        path: The file. It is opened read-only, and nothing that its schema says is run.
        limits: Bounds on events, distinct names and the length of names.

    Raises:
        InputError: The file cannot be opened as a database (``E320``), it is a database but no
            export of Nsight Systems (``E321``), it holds no events of CUDA or NVTX (``E322``), or
            it holds more events (``E313``) or names (``E314``) than ``limits`` allow.
    """
    health: dict[str, int] = {}
    try:
        with open_database(path) as database:
            _check_holds(database, path)
            contents = read_tables(database, str(path), limits, health)
            version = _version_of(database)
    except (*UNREADABLE, OSError) as error:
        raise InputError(
            "E320",
            f"{path} cannot be read as an SQLite database.",
            why=str(error),
            hint="export it again with `nsys export --type sqlite`, and copy it whole",
        ) from None
    if not len(contents.events):
        raise _refuse_empty(path)
    events = _one_process(contents.events, health)
    return _trace(events, contents, version, health)


def _one_process(events: EventRows, health: dict[str, int]) -> EventRows:
    """The events of the process that says most; those whose process is unknown stay."""
    processes, mine = np.unique(events.process, return_inverse=True)
    # Operators weigh more than any device work, and that more than any call.
    scores = [
        tuple(np.bincount(mine[which], minlength=len(processes)).tolist())
        for which in (events.said[:, 1] == Kind.OP, events.on_device, np.full(len(mine), True))
    ]
    ranking = list(zip(*scores, strict=True))
    known = [place for place, process in enumerate(processes.tolist()) if process != UNKNOWN]
    if len(known) < 2:
        return events
    best = max(known, key=lambda place: (ranking[place], -place))
    kept = (events.process == processes[best]) | (events.process == UNKNOWN)
    health["events_of_other_processes"] = int((~kept).sum())
    return events.rows(kept)


def _trace(events: EventRows, contents: Export, version: str, health: dict[str, int]) -> Trace:
    thread, threads = _threads(events)
    metadata: dict[str, Any] = {"source": f"Nsight Systems {version}".strip()}
    if contents.devices:
        metadata["deviceProperties"] = [{"name": name} for name in contents.devices]
    return Trace(
        name=events.said[:, 0].astype(np.int32),
        kind=events.said[:, 1].astype(np.int8),
        thread=thread,
        ts=events.start - min(0, int(events.start.min(initial=0))),
        dur=events.end - events.start,
        sequence=events.said[:, 2].copy(),
        correlation=events.correlation,
        stream=events.stream.astype(np.int32),
        dims=events.said[:, 3].astype(np.int32),
        names=contents.names.names,
        threads=threads,
        signatures=contents.names.signatures,
        metadata=metadata,
        health=health,
        left_out=contents.left_out,
    )


def _threads(events: EventRows) -> tuple[Int32, tuple[tuple[str, str], ...]]:
    """Code of each event's thread or stream, and what they are called."""
    thread = np.zeros(len(events), np.int32)
    called: list[tuple[str, str]] = []
    for on_device in (False, True):
        rows = events.on_device == on_device
        places, codes = np.unique(events.place[rows], return_inverse=True)
        thread[rows] = codes + len(called)
        for place in places.tolist():
            if on_device:
                called.append((str(place >> 32), f"stream {place & _LOW_32}"))
            elif place == UNKNOWN:
                called.append(("unknown", "unknown"))
            else:
                called.append((str(place >> 24 & _LOW_24), str(place & _LOW_24)))
    return thread, tuple(called)


def _check_holds(database: Database, path: Path) -> None:
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


def _refuse_empty(path: Path) -> InputError:
    """``E322``: the tables are there, and not one event is in them."""
    return InputError(
        "E322",
        f"{path} holds no events.",
        why="its tables of kernels, CUDA calls and NVTX ranges are empty or missing",
        hint=_RECORD,
    )


def _version_of(database: Database) -> str:
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
