"""More large inputs, each of a size that can be asked for: wide traces, and the other readers'."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import sqlite3
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from recompute_scan.analysis.pipeline import analyse, result_of
from recompute_scan.check.policy import Baseline
from recompute_scan.result import Result
from recompute_scan.result.run_record import RunInfo
from recompute_scan.trace.columns import DEFAULT_LIMITS
from recompute_scan.trace.nsys import load_nsys
from recompute_scan.trace.sources import read as read_any
from tests.fuzz.filled import filled
from tests.fuzz.seeds import training
from tests.sources import nsys_builder
from tests.sources.test_snapshots import generated
from tests.trace.kineto_reading import parse

Make = Callable[[int], bytes]
_TIMED = {"ph": "X", "pid": 7, "tid": 7, "dur": 1.0}


def _document(events: Iterable[dict[str, Any]]) -> bytes:
    return json.dumps({"traceEvents": list(events)}).encode()


def _in_a_row(**more: Callable[[int], Any]) -> Make:
    """Operators one after the other, in which these fields differ."""
    known = _TIMED | {"cat": "cpu_op", "name": "aten::linear"}
    return lambda n: _document(
        known | {"ts": 2.0 * i} | {key: of(i) for key, of in more.items()} for i in range(n)
    )


def _launches(n: int, *, streams: int = 1, correlations: int | None = None) -> bytes:
    """Kernels with their launches, and lines between them, on so many streams."""
    events: list[dict[str, Any]] = [
        _TIMED | {"cat": "cpu_op", "name": "aten::linear", "ts": 0.0, "dur": 4.0 * n}
    ]
    for i in range(n):
        number = i if correlations is None else i % correlations
        launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 3.0 * i}
        events.append(_TIMED | launch | {"args": {"correlation": number}})
        kernel = {"cat": "kernel", "name": "gemm", "pid": 0, "tid": i % streams, "ts": 3.0 * i + 2}
        place = {"correlation": number, "stream": i % streams, "device": 0}
        events.append(_TIMED | kernel | {"args": place})
        flow = {"id": number, "cat": "ac2g", "name": "ac2g", "pid": 7, "tid": 7, "ts": 3.0 * i}
        events += [flow | {"ph": "s"}, flow | {"ph": "f", "bp": "e", "ts": 3.0 * i + 2}]
    return _document(events)


def _pairs(n: int, *, kinds: int | None = None, depth: int = 8) -> bytes:
    """Kernels alone, some layers forward and back at a time, of so many kinds or each its own."""
    kinds = kinds or n
    order = [
        (way, place)
        for first in range(0, n, depth)
        for way, places in (
            ("fwd", range(first, first + depth)),
            ("bwd", range(first + depth - 1, first - 1, -1)),
        )
        for place in places
    ]
    return _document(
        _TIMED
        | {"cat": "kernel", "name": f"op{place % kinds}_{way}_kernel", "pid": 0, "ts": 2.0 * at}
        | {"args": {"stream": 7, "device": 0, "correlation": at}}
        for at, (way, place) in enumerate(order)
    )


def _allocations(n: int) -> bytes:
    memory = {"ph": "i", "s": "t", "name": "[memory]", "cat": "cpu_instant_event"}
    return _document(
        memory
        | {"pid": 7, "tid": 7, "ts": 2.0 * i}
        | {"args": {"Addr": i, "Bytes": 512, "Total Allocated": 512 * i, "Device Type": 1}}
        for i in range(n)
    )


def _frames(n: int) -> bytes:
    """A program that calls itself, with operators at the bottom."""
    frame = _TIMED | {"cat": "python_function", "name": "a.py(1): f"}
    return _document(
        [
            frame | {"ts": float(i), "dur": 4.0 * n - 2 * i, "args": {"Python id": i}}
            for i in range(n)
        ]
        + [_TIMED | {"cat": "cpu_op", "name": "aten::linear", "ts": n + 1.0}]
    )


def wider_traces() -> dict[str, Make]:
    """Traces with very many of one thing."""
    return {
        "processes": _in_a_row(pid=lambda i: i),
        "names": _in_a_row(name=lambda i: f"mine::x{i}"),
        "names of one letter": _in_a_row(name=lambda i: f"aten::{'a' * (i % 500)}"),
        "a long string each": _in_a_row(name=lambda i: f"mine::{i}" + "x" * 3000),
        "shapes": _in_a_row(args=lambda i: {"Input Dims": [[i, 4]], "Input type": ["float"]}),
        "deep shapes": _in_a_row(args=lambda i: {"Input Dims": json.loads("[" * 40 + "]" * 40)}),
        "equal times": _in_a_row(ts=lambda _: 5.0),
        "equal times and numbers": _in_a_row(
            ts=lambda _: 5.0, args=lambda _: {"Sequence number": 7}
        ),
        "no length": _in_a_row(ts=lambda _: 5.0, dur=lambda _: 0),
        "backwards": _in_a_row(ts=lambda i: 1e9 - 2.0 * i),
        "launches": _launches,
        "streams": lambda n: _launches(n, streams=n),
        "launches of one number": lambda n: _launches(n, correlations=1),
        "pairs of kernels": lambda n: _pairs(n, kinds=1),
        "kinds of pairs": _pairs,
        "allocations": _allocations,
        "frames": _frames,
        "layers": lambda n: training(2, n),
        "short steps": lambda n: training(n, 1),
    }


def whole(data: bytes) -> None:
    """Any file of a trace, within the limits that everybody has, except that it is in memory."""
    result_of(read_any(io.BytesIO(data), "fuzzed.json.gz", health={}))


def packed(data: bytes) -> None:
    """An archive, as a file."""
    with tempfile.NamedTemporaryFile(suffix=".zip") as file:
        file.write(data)
        file.flush()
        analyse([Path(file.name)])


def nsys(data: bytes) -> None:
    """A database, as a file."""
    with tempfile.NamedTemporaryFile(suffix=".sqlite") as file:
        file.write(data)
        file.flush()
        result_of(load_nsys(Path(file.name), DEFAULT_LIMITS))


def _export(n: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.sqlite")
        nsys_builder.from_trace(parse(training(n, 2), "seed"), path, by_id=False)
        return path.read_bytes()


def _ranges(n: int, *, texts: bool = False, nested: bool = False, threads: bool = False) -> bytes:
    """NVTX ranges alone, in a row or in each other."""
    with tempfile.TemporaryDirectory() as folder:
        export = nsys_builder.Export(Path(folder, "trace.sqlite"))
        rows = [
            (
                10 * i,
                10 * i + 5 if not nested else 40 * n - 10 * i,
                nsys_builder.PUSH_POP,
                f"aten::x{i if texts else 0}, op_id = {i}",
                nsys_builder.global_tid(7, i if threads else 7),
            )
            for i in range(n)
        ]
        fields = "start, end, eventType, text, globalTid"
        with closing(sqlite3.connect(export.path)) as connection, connection:
            connection.executemany(
                f"INSERT INTO NVTX_EVENTS ({fields}) VALUES (?, ?, ?, ?, ?)", rows
            )
        return export.path.read_bytes()


def _archive(n: int, *, members: bool) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for rank in range(n if members else 1):
            archive.writestr(f"trace-rank{rank}.json", training(1, 1) if members else training(n))
    return buffer.getvalue()


def _lists_longer(kind: Any) -> Make:
    """A document with everything that there can be, and every list so many times as long."""

    def longer(value: Any, n: int) -> Any:
        if isinstance(value, list) and value:
            return [longer(one, 1) for one in value] * n
        if isinstance(value, dict):
            return {key: longer(one, n) for key, one in value.items()}
        return value

    return lambda n: msgspec.json.encode(longer(msgspec.json.decode(filled(kind)), n))


_STACK = b'  File "a.py", line 1, in b\n    x()\n'
_RANK = b"[rank%d]: Traceback (most recent call last):\n[rank%d]: RuntimeError: x%d\n"
_WATCHDOG = (
    b"[rank%d]:[E ProcessGroupNCCL.cpp:607] [Rank %d] Watchdog caught collective operation "
    b"timeout: WorkNCCL(SeqNum=%d, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
    b"Timeout(ms)=600000) ran for 600060 milliseconds before timing out.\n"
)


def _lines(line: bytes) -> Make:
    """A log of this line, with a number wherever it has one."""
    places = line.count(b"%d")
    return lambda n: b"".join(line % ((i,) * places) for i in range(n))


def wider_logs() -> dict[str, Make]:
    """Logs of very many processes, handlers and groups."""
    return {
        "ranks": _lines(_RANK),
        "watchdogs": _lines(_WATCHDOG),
        "actors": _lines(b"(Worker pid=%d) ValueError: x%d\n"),
        "groups of exceptions": _lines(b"    | ValueError: x%d\n    +---------------- %d ---\n"),
        "handlers": _lines(b"*** SIGTERM received at time=%d ***\nCaught signal 15 (%d)\n"),
        "chains": _lines(
            b"Traceback (most recent call last):\n"
            + _STACK
            + b"E%d: x\n\nDuring handling of the above exception, another exception occurred:\n\n"
        ),
        "one line": lambda n: b"x" * (60 * n),
        "signals": lambda n: b"Signal: A" + b"a " * n,
        "bars": lambda n: b" | " * n + b"\n" + b"  | " * n,
    }


def wider_files() -> dict[str, tuple[Make, Callable[[bytes], object]]]:
    """Of everything else that is read."""
    return {
        "gz of steps": (lambda n: gzip.compress(training(n, 2), 1), whole),
        "gz of spaces": (lambda n: gzip.compress(b'{"traceEvents": [' + b" " * 3000 * n), whole),
        "nsys of steps": (_export, nsys),
        "nsys of ranges": (_ranges, nsys),
        "nsys of texts": (lambda n: _ranges(n, texts=True), nsys),
        "nsys of nested": (lambda n: _ranges(n, nested=True), nsys),
        "nsys of threads": (lambda n: _ranges(n, threads=True), nsys),
        "archive of members": (lambda n: _archive(n, members=True), packed),
        "archive of steps": (lambda n: _archive(n, members=False), packed),
    }


def wider_texts() -> dict[str, tuple[Make, str]]:
    """Of the targets of the fuzzer, by their names."""
    return {
        "result of all": (_lists_longer(Result), "result"),
        "baseline of all": (_lists_longer(Baseline), "baseline"),
        "run_record of all": (_lists_longer(RunInfo), "run_record"),
        "snapshot of events": (lambda n: pickle.dumps(generated(7, n)[0], 4), "snapshot"),
        "snapshot of lists": (lambda n: b"\x80\x04" + b"]" * n + b"a" * (n - 1) + b".", "snapshot"),
        "config of brackets": (lambda n: b"a: " + b"[" * n, "config"),
        "config of text": (lambda n: b"a: '" + b"b" * n + b"'", "config"),
        "lint of brackets": (lambda n: b"f(" * n, "lint"),
        "lint of lambdas": (lambda n: b"f = " + b"lambda: " * n + b"1\n", "lint"),
        "lint of a sum": (lambda n: b"x = 1" + b" + 1" * n + b"\n", "lint"),
        "lint of ifs": (lambda n: b"if a: pass\n" + b"elif b: checkpoint(f)\n" * n, "lint"),
    }
