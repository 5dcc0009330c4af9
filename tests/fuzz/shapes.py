"""Large inputs of nasty shapes, each of a size that can be asked for: deep, wide and damaged ones.

``python -m tests.fuzz.shapes NAME BYTES`` reads one and prints the most memory that took, in bytes.
"""

import gzip
import io
import json
import multiprocessing
import pickle
import sqlite3
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from recompute_scan.analysis.pipeline import analyse, result_of
from recompute_scan.check.policy import Baseline
from recompute_scan.compiled.code import graphs_from
from recompute_scan.compiled.logs import read_records
from recompute_scan.errors import ScanError
from recompute_scan.result import Result
from recompute_scan.result.run_record import RunInfo
from recompute_scan.trace.columns import DEFAULT_LIMITS
from recompute_scan.trace.nsys import load_nsys
from recompute_scan.trace.sources import read as read_any
from tests.fuzz.filled import filled
from tests.fuzz.seeds import training
from tests.fuzz.target import log, outcome, whole_of_any_size
from tests.sources import nsys_builder
from tests.sources.test_snapshots import generated
from tests.trace.kineto_reading import parse

NODE = "autograd::engine::evaluate_function: "
Make = Callable[[int], bytes]
_TIMED = {"ph": "X", "pid": 7, "tid": 7, "dur": 1.0}


def _event(name: str, ts: float, dur: Any, **more: Any) -> dict[str, Any]:
    args = {"Sequence number": more.pop("number")} if "number" in more else {}
    known = {"ph": "X", "cat": "cpu_op", "pid": 7, "tid": 7, "args": args | more.pop("args", {})}
    return {**known, "name": name, "ts": ts, "dur": dur, **more}


def _document(events: Iterable[dict[str, Any]]) -> bytes:
    return json.dumps({"traceEvents": list(events)}).encode()


def nested(name: str, **more: Any) -> Make:
    """Each event inside the one before."""
    return lambda n: _document(_event(name, i, 4 * n - 2 * i, number=i, **more) for i in range(n))


def _nodes(n: int) -> bytes:
    names = (NODE + "AddmmBackward0", "AddmmBackward0")
    events = (_event(names[i % 2], i, 4 * n - 2 * i, number=i // 2) for i in range(n))
    return _document(events)


def _regions(n: int) -> bytes:
    name = "recompute_scan.region?call={}&depth=0"
    events = (_event(name.format(i + 1), i, 4 * n - 2 * i, cat="user_annotation") for i in range(n))
    return _document(events)


def _threads(n: int) -> bytes:
    return _document(_event("aten::linear", i, 3, number=i, tid=i) for i in range(n))


def _overlapping(n: int) -> bytes:
    return _document(_event("aten::linear", i, n + 0.5, number=i) for i in range(n))


def _one_number(n: int) -> bytes:
    operators = [_event("aten::linear", 2 * i, 1, number=1) for i in range(n)]
    nodes = [
        _event(NODE * (j == 0) + "AddmmBackward0", 2 * n + 4 * i + j, 3 - 2 * j, number=1)
        for i in range(n)
        for j in (0, 1)
    ]
    return _document(operators + nodes)


def _one_number_many_names(n: int) -> bytes:
    operators = [_event(f"mine::x{i}", 2 * i, 1, number=1) for i in range(n)]
    nodes = [_event(f"{NODE}A{i}Backward0", 2 * n + 4 * i, 3, number=1) for i in range(n)]
    return _document(operators + nodes)


def _steps(n: int) -> bytes:
    return _document(
        event
        for i in range(n)
        for event in (
            _event(f"ProfilerStep#{i}", 20 * i, 19, cat="user_annotation"),
            _event("aten::linear", 20 * i + 1, 1, number=i),
            _event(NODE + "AddmmBackward0", 20 * i + 3, 4, number=i, tid=8),
            _event("AddmmBackward0", 20 * i + 4, 2, number=i, tid=8),
            _event("Optimizer.step#A.step", 20 * i + 10, 3, cat="user_annotation"),
        )
    )


def _odd_numbers(n: int) -> bytes:
    return _document(
        _event("aten::mm", 10 ** (i % 40) * (-1) ** i, "7" if i % 5 else 1e300, number=10**30 + i)
        for i in range(n)
    )


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


def _repeated(begin: bytes, part: bytes, end: bytes = b"") -> Make:
    return lambda n: begin + part * n + end


def _record(fields: dict[str, Any], payload: str = "") -> str:
    fields = {**fields, "frame_id": 0, "frame_compile_id": 0, "attempt": 0}
    lines = "".join(f"\t{line}\n" for line in payload.splitlines())
    return f"V0101 00:00:00.000000 1 torch/x.py:1] {json.dumps(fields)}\n{lines}"


def _graph(n: int) -> bytes:
    lines = "".join(
        f'        mm_{i + 1}: "f32[4]" = torch.ops.aten.mm.default(mm_{i}, a)\n' for i in range(n)
    )
    text = f'class G(torch.nn.Module):\n    def forward(self, a: "f32[4]"):\n{lines}'
    return "".join(
        _record({f"aot_{way}_graph": {}}, text) for way in ("forward", "backward")
    ).encode()


def _records(n: int) -> bytes:
    return (_record({"aot_forward_graph": {}}, "x") * n).encode()


def structured(data: bytes) -> None:
    """The compiler's log."""
    graphs_from(list(read_records(data.decode(errors="replace").split("\n"))), None)


_TRACE = b'{"traceEvents": ['
_TB = b"Traceback (most recent call last):\n"
_FRAME = b'  File "a.py", line 1, in b\n    x()\n'
_TRACES: dict[str, Make] = {
    "nested operators": nested("aten::linear"),
    "nested checkpoints": nested("CheckpointFunction"),
    "nested steps": nested("ProfilerStep#1", cat="user_annotation"),
    "nested nodes": _nodes,
    "nested regions": _regions,
    "threads": _threads,
    "overlapping": _overlapping,
    "one number": _one_number,
    "one number, many names": _one_number_many_names,
    "steps": _steps,
    "odd numbers": _odd_numbers,
    "quotes": _repeated(_TRACE + b'{"ph":"X","name":"', b'a" : "', b'"}]}'),
    "braces": _repeated(_TRACE, b"{"),
    "closing braces": _repeated(_TRACE + b'{"ph":"X","name":"a\\q"', b"}"),
    "closed amid": _repeated(_TRACE + b'{"ph":"X","name":"a"b",', b"},\n{"),
    "raw backslashes": _repeated(_TRACE, b'{"ph":"X","name":"a\\q"},\n'),
    "not finite": _repeated(_TRACE + b'{"ph":"X","a":[', b"nan, ", b"1]}]}"),
    "digits": _repeated(_TRACE + b'{"ph":"X","a":[nan, ', b"1.", b"]}]}"),
    "commas": _repeated(_TRACE + b'{"ph":"X","a":[1', b" , ", b"]}]}"),
    "keys": _repeated(_TRACE + b'{"ph":"X",', b'"b": "c"d",', b"}]}"),
    "deep": _repeated(_TRACE + b'{"ph":"X","a":', b"[", b"}]}"),
    # Very many of one thing.
    "processes": _in_a_row(pid=lambda i: i),
    "names": _in_a_row(name=lambda i: f"mine::x{i}"),
    "names of one letter": _in_a_row(name=lambda i: f"aten::{'a' * (i % 500)}"),
    "a long string each": _in_a_row(name=lambda i: f"mine::{i}" + "x" * 3000),
    "shapes": _in_a_row(args=lambda i: {"Input Dims": [[i, 4]], "Input type": ["float"]}),
    "deep shapes": _in_a_row(args=lambda i: {"Input Dims": json.loads("[" * 40 + "]" * 40)}),
    "equal times": _in_a_row(ts=lambda _: 5.0),
    "equal times and numbers": _in_a_row(ts=lambda _: 5.0, args=lambda _: {"Sequence number": 7}),
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


_LOGS: dict[str, Make] = {
    "tracebacks": _repeated(b"", _TB),
    "frames": _repeated(_TB, _FRAME, b"RuntimeError: x\n"),
    "chained": _repeated(b"", _TB + _FRAME + b"ValueError: x\n\nDuring handling of the above "
                         b"exception, another exception occurred:\n\n"),
    "prefixes": _repeated(b"", b"[rank0]: "),
    "spaces": _repeated(_TB, b" ", b"x\n"),
    "a long word": _repeated(b"", b"a.", b"Error: x\n"),
    "threads' stacks": _repeated(b"", b"Thread 0x1 (most recent call first):\n" + _FRAME),
    "returns": _repeated(b"", b"100%|x| \r"),
    # Of very many processes, handlers and groups.
    "ranks": _lines(_RANK),
    "watchdogs": _lines(_WATCHDOG),
    "actors": _lines(b"(Worker pid=%d) ValueError: x%d\n"),
    "groups of exceptions": _lines(b"    | ValueError: x%d\n    +---------------- %d ---\n"),
    "handlers": _lines(b"*** SIGTERM received at time=%d ***\nCaught signal 15 (%d)\n"),
    "chains": _lines(
        b"Traceback (most recent call last):\n"
        + _FRAME
        + b"E%d: x\n\nDuring handling of the above exception, another exception occurred:\n\n"
    ),
    "one line": lambda n: b"x" * (60 * n),
    "signals": lambda n: b"Signal: A" + b"a " * n,
    "bars": lambda n: b" | " * n + b"\n" + b"  | " * n,
}  # fmt: skip
_COMPILED: dict[str, Make] = {
    "a long graph": _graph,
    "records": _records,
    "a prefix": _repeated(b"V0101 00:00:00.000000 1 ", b"x"),
    "tabs": _repeated(b"V0101 00:00:00.000000 1 torch/x.py:1] {}\n", b"\t\n"),
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


def _in_json(key: str, item: str) -> Make:
    return _repeated(f'{{"schema": "{key}", "a": ['.encode(), f"{item}, ".encode(), b"1]}")


_FILES: dict[str, tuple[Make, Callable[[bytes], object]]] = {
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
_OTHERS: dict[str, tuple[Make, str]] = {
    f"{target} of {what}": (_in_json(schema, item), target)
    for target, schema in (
        ("result", "recompute-scan/1"),
        ("run_record", "recompute-scan-run/1"),
        ("baseline", "recompute-scan-baseline/1"),
        ("guard", "recompute-scan-guard/1"),
        ("rehearsal", ""),
    )
    for what, item in (("numbers", "1e99"), ("texts", '"\\\\ud800"'), ("brackets", "[[]]"))
} | {
    "config of keys": (_repeated(b"a:\n", b"  b: [c, {d: e}]\n"), "config"),
    "code of calls": (_repeated(b"1 1 1\n", b"checkpoint(f, x)\n"), "code"),
    "code of brackets": (_repeated(b"1 1 1\n", b"f("), "code"),
    "lint of calls": (_repeated(b"", b"checkpoint_wrapper(model)\n"), "lint"),
    "lint of keys": (_repeated(b"a:\n", b"  b: [c, {d: e}]\n"), "lint"),
    "lint of words": (_repeated(b"torchrun x.py", b" --a b"), "lint"),
    "snapshot of numbers": (_repeated(b"\x80\x04(", b"K\x01", b"l."), "snapshot"),
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
SHAPES: dict[str, tuple[Make, Callable[[bytes], object]]] = {
    **{name: (make, whole_of_any_size) for name, make in _TRACES.items()},
    **{name: (make, log) for name, make in _LOGS.items()},
    **{name: (make, structured) for name, make in _COMPILED.items()},
    **_FILES,
    **{
        name: (make, lambda data, target=target: outcome(target, data))  # type: ignore[misc]
        for name, (make, target) in _OTHERS.items()
    },
}


def count_for(make: Make, size: int) -> int:
    """How many parts make an input of about so many bytes, and no more."""
    few, many = len(make(100)), len(make(200))
    count = max(50, int(100 * size / max(1, many - few)))
    while len(make(count)) > size and count > 50:
        count = int(count * 0.9)
    return count


def read(name: str, data: bytes) -> None:
    """Read one input; errors with a code are an answer."""
    with suppress(ScanError):
        SHAPES[name][1](data)


def of_size(name: str, size: int) -> bytes:
    """An input of that shape, of about so many bytes."""
    make = SHAPES[name][0]
    return make(count_for(make, size))


if __name__ == "__main__":
    from tests.fuzz.__main__ import peak, start_of_peak

    # In a process of its own: what making it takes is no memory of the reader's.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        content = pool.apply(of_size, (sys.argv[1], int(sys.argv[2])))
    start_of_peak()
    read(sys.argv[1], content)
    print(peak())
