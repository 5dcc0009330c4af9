"""Databases as ``nsys export --type sqlite`` writes them, and traces turned into such."""

import re
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from recompute_scan.trace import Kind, Trace

# From the "SQLite Export Schema Reference" of Nsight Systems, without columns of no use here.
SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (id INTEGER NOT NULL, name TEXT, busLocation TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL,
    mangledName INTEGER, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, bytes INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL,
    returnValue INTEGER NOT NULL, callchainId INTEGER);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER,
    textId INTEGER, domainId INTEGER);
"""
PUSH_POP, START_END, MARK, DOMAIN = 59, 60, 34, 75
_MACHINE = 1 << 48


def global_tid(pid: int, tid: int) -> int:
    return _MACHINE | pid << 24 | tid


class Export:
    """A database being written. Times are ns.

    Args:
        path: Where it goes.
        schema: The statements that make its tables.
    """

    def __init__(self, path: Path, schema: str = SCHEMA) -> None:
        self.path = path
        self._strings: dict[str, int] = {}
        self.run(*schema.split(";"))

    def run(self, *statements: str) -> None:
        with closing(sqlite3.connect(self.path)) as connection, connection:
            for statement in statements:
                connection.execute(statement)

    def add(self, table: str, rows: Iterable[dict[str, Any]]) -> None:
        with closing(sqlite3.connect(self.path)) as connection, connection:
            for row in rows:
                marks = ", ".join("?" * len(row))
                connection.execute(
                    f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values())
                )
            connection.executemany(
                "INSERT OR IGNORE INTO StringIds VALUES (?, ?)",
                [(number, text) for text, number in self._strings.items()],
            )

    def string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings) + 1)

    def kernel(
        self, name: str, start: int, end: int, correlation: int = 1, stream: int = 7, pid: int = 100
    ) -> dict[str, Any]:
        return {
            **_device(start, end, correlation, stream, pid),
            "demangledName": self.string(name),
            "shortName": self.string(name.partition("<")[0]),
        }

    def copy(self, kind: int, start: int, end: int, correlation: int = 1) -> dict[str, Any]:
        return {**_device(start, end, correlation, 7, 100), "bytes": 8, "copyKind": kind}

    def fill(self, start: int, end: int, correlation: int = 1) -> dict[str, Any]:
        return {**_device(start, end, correlation, 7, 100), "bytes": 8}

    def call(
        self, name: str, start: int, end: int, correlation: int = 1, tid: int = 100, pid: int = 100
    ) -> dict[str, Any]:
        return {
            "start": start,
            "end": end,
            "eventClass": 0,
            "globalTid": global_tid(pid, tid),
            "correlationId": correlation,
            "nameId": self.string(name),
            "returnValue": 0,
        }

    def range(
        self, text: str, start: int, end: int | None, tid: int = 100, pid: int = 100, **more: Any
    ) -> dict[str, Any]:
        """A push/pop range with its text in the row; ``by_id=True`` puts it in StringIds."""
        by_id = more.pop("by_id", False)
        named = {"textId": self.string(text)} if by_id else {"text": text}
        row = {"start": start, "end": end, "eventType": PUSH_POP}
        return row | {"globalTid": global_tid(pid, tid)} | named | more


def _device(start: int, end: int, correlation: int, stream: int, pid: int) -> dict[str, Any]:
    return {
        "start": start,
        "end": end,
        "deviceId": 0,
        "contextId": 1,
        "streamId": stream,
        "correlationId": correlation,
        "globalPid": global_tid(pid, 0),
    }


def from_trace(trace: Trace, path: Path, *, by_id: bool) -> Path:
    """The same events as Nsight Systems records them under ``emit_nvtx(record_shapes=True)``.

    Host times and order stay. Operators and annotations become NVTX ranges.
    """
    export = Export(path)
    ranges, calls, kernels = [], [], []
    origin = int(trace.ts.min())
    for row in range(len(trace)):
        name = trace.names[trace.name[row]]
        start = int(trace.ts[row]) - origin
        end = start + int(trace.dur[row])
        correlation, tid = int(trace.correlation[row]), int(trace.thread[row]) + 100
        if trace.kind[row] in (Kind.OP, Kind.ANNOTATION):
            text = _emitted(name, int(trace.sequence[row]), row + 1, _sizes(trace, row))
            ranges.append(export.range(text, start, end, tid=tid, by_id=by_id))
        elif trace.kind[row] == Kind.RUNTIME:
            calls.append(export.call(f"{name}_v7000", start, end, correlation, tid))
        elif trace.kind[row] == Kind.KERNEL:
            stream = int(trace.stream[row])
            kernels.append(export.kernel(name, start, end, correlation, stream))
    export.add("NVTX_EVENTS", ranges)
    export.add("CUPTI_ACTIVITY_KIND_RUNTIME", calls)
    export.add("CUPTI_ACTIVITY_KIND_KERNEL", kernels)
    return path


def _emitted(name: str, sequence: int, number: int, sizes: str) -> str:
    text = f"{name}, seq = {sequence}" if sequence >= 0 else name
    text += f", op_id = {number}"
    return f"{text}, sizes = {sizes}, input_op_ids = [({number - 1},0), (0,-1)]" if sizes else text


def _sizes(trace: Trace, row: int) -> str:
    """The shapes alone: a Kineto signature also has types behind them."""
    found = re.match(r"\[[\[\], 0-9]*\]", trace.signatures[trace.dims[row]])
    return "" if found is None or found[0] == "[]" else re.sub(r",\s*", ", ", found[0])
