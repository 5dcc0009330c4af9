"""Kineto's Chrome-trace JSON, torch 1.8 to today, to columns.

The field names and their changes over the versions are those of Kineto's own writer
(``libkineto/src/output_json.cpp``) as found in traces of each version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from recompute_scan.errors import InputError
from recompute_scan.trace.columns import Kind, Trace
from recompute_scan.trace.repair import mend_text

_KINDS = {
    "cpu_op": Kind.OP,
    "Operator": Kind.OP,
    "user_annotation": Kind.ANNOTATION,
    "cuda_runtime": Kind.RUNTIME,
    "cuda_driver": Kind.RUNTIME,
    "Runtime": Kind.RUNTIME,
    "kernel": Kind.KERNEL,
    "Kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.COPY,
    "gpu_memset": Kind.COPY,
    "Memcpy": Kind.COPY,
    "Memset": Kind.COPY,
    "python_function": Kind.PYTHON,
}
# Before torch 1.11 user ranges had the category of operators.
_ANNOTATION_PREFIXES = ("ProfilerStep#", "Optimizer.")
_NOTHING = msgspec.Raw(b"")


class _Args(msgspec.Struct, gc=False, frozen=True):
    # Shapes stay the bytes they came in: decoding them would cost more than all the rest.
    sequence: Any = msgspec.field(default=-1, name="Sequence number")
    correlation: Any = -1
    stream: Any = -1
    input_dims: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input Dims")
    old_input_dims: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input dims")
    input_type: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input type")


_NO_ARGS = _Args()


class _Event(msgspec.Struct, gc=False):
    ph: Any = ""
    cat: Any = ""
    name: Any = ""
    pid: Any = -1
    tid: Any = -1
    ts: Any = None
    dur: Any = 0
    args: _Args | None = None


class _Document(msgspec.Struct):
    traceEvents: list[_Event] | None = None  # noqa: N815 - the format's own name
    distributedInfo: Any = None  # noqa: N815
    deviceProperties: Any = None  # noqa: N815
    schemaVersion: Any = None  # noqa: N815
    record_shapes: Any = None
    with_stack: Any = None
    cuda_runtime_version: Any = None
    hip_runtime_version: Any = None


def parse(data: bytes, source: str) -> Trace:
    """The trace in a Kineto JSON document, or in a bare array of its events.

    Args:
        data: The whole document, uncompressed.
        source: Its name, for messages.

    Raises:
        InputError: Not JSON (``E302``), JSON but no trace (``E303``), no events (``E304``).
    """
    health: dict[str, int] = {}
    document = _decode(data, source, health)
    events = [event for event in document.traceEvents or () if event.ph == "X"]
    if not events:
        raise InputError(
            "E304",
            f"{source} holds no events.",
            why="the profiler wrote an empty cycle, or recording stopped before it began",
            hint="record at least one whole step; a schedule needs repeat=1 or more steps",
        )
    return _columns(events, document, health)


def _decode(data: bytes, source: str, health: dict[str, int]) -> _Document:
    try:
        try:
            document = _decode_strictly(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            mended = mend_text(data)
            if isinstance(error, msgspec.ValidationError) or mended == data:
                raise
            document = _decode_strictly(mended)
            health["text_repaired"] = 1
    except msgspec.ValidationError as error:
        raise _no_trace(source, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(
            "E302",
            f"{source} is not JSON.",
            why=str(error),
            hint="give a trace that torch.profiler's export_chrome_trace wrote (.json or .json.gz)",
        ) from None
    if document.traceEvents is None:
        raise _no_trace(source, 'it has no "traceEvents"')
    return document


def _decode_strictly(data: bytes) -> _Document:
    if data.lstrip()[:1] == b"[":
        return _Document(traceEvents=msgspec.json.decode(data, type=list[_Event]))
    return msgspec.json.decode(data, type=_Document)


def _no_trace(source: str, why: str) -> InputError:
    return InputError(
        "E303",
        f"{source} is JSON, but no profiler trace.",
        why=why,
        hint="give a trace that torch.profiler's export_chrome_trace wrote",
    )


def _columns(events: Sequence[_Event], document: _Document, health: dict[str, int]) -> Trace:
    every_args = [event.args or _NO_ARGS for event in events]
    names: dict[Any, int] = {}
    threads: dict[tuple[str, str], int] = {}
    signatures: dict[bytes, int] = {b"": 0}
    name_codes = np.array([names.setdefault(str(e.name), len(names)) for e in events], np.int32)
    kinds = np.array([_KINDS.get(str(e.cat), Kind.OTHER) for e in events], np.int8)
    annotations = np.array([name.startswith(_ANNOTATION_PREFIXES) for name in names], np.bool_)
    kinds[(kinds == Kind.OP) & annotations[name_codes]] = Kind.ANNOTATION
    thread_codes = [threads.setdefault((str(e.pid), str(e.tid)), len(threads)) for e in events]
    dims = [
        signatures.setdefault(
            bytes(args.input_dims) + bytes(args.old_input_dims) + bytes(args.input_type),
            len(signatures),
        )
        for args in every_args
    ]
    ts = _numbers(events, lambda e: e.ts, "events_without_time", health)
    dur = _numbers(events, lambda e: e.dur, "events_without_duration", health)
    usable = ~np.isnan(ts)
    # Nanoseconds since 1970 do not fit into a float: count from the first event, then add.
    base = float(np.floor(ts[usable].min())) if usable.any() else 0.0
    ts_ns = np.rint((np.where(usable, ts, base) - base) * 1000).astype(np.int64) + int(base) * 1000
    dur_ns = np.rint(np.where(np.isnan(dur), 0.0, np.maximum(dur, 0.0)) * 1000).astype(np.int64)

    def integers(get: Callable[[_Args], Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array([_integer(get(args)) for args in every_args], np.int64)

    return Trace(
        name=name_codes[usable],
        kind=kinds[usable],
        thread=np.array(thread_codes, np.int32)[usable],
        ts=ts_ns[usable],
        dur=dur_ns[usable],
        sequence=integers(lambda args: args.sequence)[usable],
        correlation=integers(lambda args: args.correlation)[usable],
        stream=integers(lambda args: args.stream).astype(np.int32)[usable],
        dims=np.array(dims, np.int32)[usable],
        names=tuple(names),
        threads=tuple(threads),
        signatures=tuple(key.decode(errors="replace") for key in signatures),
        rank=_rank(document.distributedInfo),
        metadata=_metadata(document),
        health=health,
    )


def _numbers(
    events: Sequence[_Event], get: Callable[[_Event], Any], counter: str, health: dict[str, int]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = np.array([_number(get(event)) for event in events], np.float64)
    # Beyond this, nanoseconds do not fit into 63 bits; no clock goes there.
    values[~(np.abs(values) < 2.0**53)] = np.nan
    if missing := int(np.isnan(values).sum()):
        health[counter] = missing
    return values


def _number(value: Any) -> float:
    if isinstance(value, (int, float)):
        return float(value)
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def _integer(value: Any) -> int:
    if isinstance(value, int):
        return value if -(2**31) <= value < 2**62 else -1
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 18:
        return int(value)
    return -1


def _rank(info: Any) -> int | None:
    rank = info.get("rank") if isinstance(info, dict) else None
    return rank if isinstance(rank, int) and 0 <= rank < 2**31 else None


def _metadata(document: _Document) -> dict[str, Any]:
    fields = msgspec.structs.asdict(document)
    del fields["traceEvents"]
    return {name: value for name, value in fields.items() if value is not None}
