"""A clean trace as Kineto's JSON, one event a line, for this program and for trace viewers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from recompute_scan.arrays import distinct
from recompute_scan.bundle.clean import CATEGORIES
from recompute_scan.trace import Kind, Trace
from recompute_scan.trace.columns import Int64

_AT_ONCE = 20_000


def trace_json(trace: Trace, rows: Int64) -> Iterator[bytes]:
    """The document in pieces. Times are µs from the first row's start, exact to the ns.

    Args:
        trace: As :func:`recompute_scan.bundle.clean.clean_trace` makes it.
        rows: The rows to write, in order.
    """
    yield (json.dumps(_head(trace))[:-1] + ', "traceEvents": [\n').encode()
    yield ",\n".join(_process_rows(trace, rows)).encode()
    names = [json.dumps(name) for name in trace.names]
    args = [_shapes(text) for text in trace.signatures]
    places = [f'"pid":{pid},"tid":{tid}' for pid, tid in trace.threads]
    start = int(trace.ts[rows].min()) if len(rows) else 0
    for first in range(0, len(rows), _AT_ONCE):
        part = rows[first : first + _AT_ONCE]
        columns = (
            trace.kind[part], trace.name[part], trace.thread[part], trace.ts[part] - start,
            trace.dur[part], trace.sequence[part], trace.correlation[part], trace.stream[part],
            trace.dims[part],
        )  # fmt: skip
        lines = []
        for kind, name, thread, ts, dur, sequence, correlation, stream, dims in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            fields = args[dims]
            if sequence >= 0:
                fields += f',"Sequence number":{sequence}'
            if correlation >= 0:
                fields += f',"correlation":{correlation}'
            if stream >= 0:
                fields += f',"stream":{stream}'
            lines.append(
                f'{{"ph":"X","cat":"{_CATEGORY[kind]}","name":{names[name]},{places[thread]},'
                f'"ts":{_us(ts)},"dur":{_us(dur)},"args":{{{fields[1:]}}}}}'
            )
        yield (",\n" + ",\n".join(lines)).encode()
    yield b"\n]}\n"


_CATEGORY = {int(kind): text for kind, text in CATEGORIES.items()}


def _us(ns: int) -> str:
    whole, rest = divmod(ns, 1000)
    return f"{whole}.{rest:03d}" if rest else str(whole)


def _head(trace: Trace) -> dict[str, Any]:
    head: dict[str, Any] = {"schemaVersion": 1, "displayTimeUnit": "ms", **trace.metadata}
    if trace.rank is not None:
        head["distributedInfo"] = {**head.get("distributedInfo", {}), "rank": trace.rank}
    return head


def _process_rows(trace: Trace, rows: Int64) -> Iterator[str]:
    """What viewers show beside the tracks."""
    shown = set()
    for code in distinct(trace.thread[rows]).tolist():
        pid, tid = trace.threads[code]
        mine = trace.kind[rows][trace.thread[rows] == code]
        device = Kind(int(mine[0])) in (Kind.KERNEL, Kind.COPY)
        if pid not in shown:
            shown.add(pid)
            yield _meta("process_name", pid, 0, "device" if device else "host")
        yield _meta("thread_name", pid, int(tid), f"{'queue' if device else 'thread'} {tid}")
    if not shown:
        yield _meta("process_name", "1", 0, "host")


def _meta(name: str, pid: str, tid: int, text: str) -> str:
    event = {"ph": "M", "name": name, "pid": int(pid), "tid": tid, "ts": 0, "args": {"name": text}}
    return json.dumps(event, separators=(",", ":"))


def _shapes(signature: str) -> str:
    if not signature:
        return ""
    dims, kinds, values = json.loads(signature)
    fields = (("Input Dims", dims), ("Input type", kinds), ("Concrete Inputs", values))
    return "".join(
        f',"{field}":{json.dumps(value, separators=(",", ":"))}'
        for field, value in fields
        if value is not None
    )
