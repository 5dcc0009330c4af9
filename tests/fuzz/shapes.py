"""Large inputs of nasty shapes, each of a size that can be asked for.

``python -m tests.fuzz.shapes NAME BYTES`` reads one and prints the most memory that took, in bytes.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from recompute_scan.compiled.code import graphs_from
from recompute_scan.compiled.logs import read_records
from recompute_scan.errors import ScanError
from tests.fuzz.target import log, outcome, whole_of_any_size
from tests.fuzz.wider import wider_files, wider_logs, wider_texts, wider_traces

NODE = "autograd::engine::evaluate_function: "
Make = Callable[[int], bytes]


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
}
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
}  # fmt: skip
_COMPILED: dict[str, Make] = {
    "a long graph": _graph,
    "records": _records,
    "a prefix": _repeated(b"V0101 00:00:00.000000 1 ", b"x"),
    "tabs": _repeated(b"V0101 00:00:00.000000 1 torch/x.py:1] {}\n", b"\t\n"),
}


def _in_json(key: str, item: str) -> Make:
    return _repeated(f'{{"schema": "{key}", "a": ['.encode(), f"{item}, ".encode(), b"1]}")


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
}
SHAPES: dict[str, tuple[Make, Callable[[bytes], object]]] = {
    **{name: (make, whole_of_any_size) for name, make in (_TRACES | wider_traces()).items()},
    **{name: (make, log) for name, make in (_LOGS | wider_logs()).items()},
    **{name: (make, structured) for name, make in _COMPILED.items()},
    **wider_files(),
    **{
        name: (make, lambda data, target=target: outcome(target, data))  # type: ignore[misc]
        for name, (make, target) in (_OTHERS | wider_texts()).items()
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
