"""What ``rocprofv3 --output-format json`` writes: the kernels of a process, without operators.

A dispatch says which thread asked for it, and not when. So each kernel gets a launch of that thread
at the moment at which the kernel began: enough to tell the thread of the forward pass from that of
the backward pass, and the order in which kernels ran. The form is that of
``rocprofiler-sdk-tool`` (``rocprofiler-sdk``, ``source/lib/output/generateJSON.cpp``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

import msgspec
import numpy as np

from recompute_scan.errors import InputError
from recompute_scan.trace.columns import Int32, Kind, Trace
from recompute_scan.trace.limits import Limits, refuse_distinct, refuse_event_size, refuse_events
from recompute_scan.trace.streams import Stream

_BEGINS = re.compile(rb'\s*\{\s*"rocprofiler-sdk')
_LAUNCH = "hipLaunchKernel"
_CHUNK = 1 << 22
# The whole file is one value; that of an hour of training is smaller.
_MOST_BYTES = 4 << 30


# Nanoseconds of a machine's clock.
_Time = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]


class _RocmHandle(msgspec.Struct, gc=False):
    handle: int = -1


class _Dispatch(msgspec.Struct, gc=False):
    kernel_id: int
    agent_id: _RocmHandle
    queue_id: _RocmHandle


class _Record(msgspec.Struct, gc=False):
    start_timestamp: _Time
    end_timestamp: _Time
    dispatch_info: _Dispatch
    thread_id: int = -1


class _Symbol(msgspec.Struct, gc=False):
    kernel_id: int
    kernel_name: str = ""
    formatted_kernel_name: str = ""


class _Agent(msgspec.Struct, gc=False):
    id: _RocmHandle
    product_name: str = ""


class _Records(msgspec.Struct):
    kernel_dispatch: list[_Record] = []


class _Metadata(msgspec.Struct):
    pid: int = 0


class _Process(msgspec.Struct):
    buffer_records: _Records
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    kernel_symbols: list[_Symbol] = []
    agents: list[_Agent] = []


class _Document(msgspec.Struct):
    processes: list[_Process] = msgspec.field(name="rocprofiler-sdk-tool")


def is_rocprof(front: bytes) -> bool:
    """Does a file that begins with these bytes (32 or more of them) come from rocprofv3?"""
    return _BEGINS.match(front) is not None


def read_rocprof(stream: Stream, source: str, limits: Limits, health: dict[str, int]) -> Trace:
    """The trace in a stream without compression: kernels, and a launch for each.

    Of several processes, the one with the most kernels is read; those of others are counted.

    Args:
        stream: The bytes.
        source: Their name, for messages.
        limits: What is refused.
        health: Counters to add to.

    Raises:
        InputError: Not the JSON that it begins as (``E302``), no kernels (``E304``), or beyond a
            limit (``E313`` to ``E315``).
    """
    document = _decoded(_whole(stream, source), source)
    processes = sorted(document.processes, key=_size)
    if not processes or not _size(processes[-1]):
        raise InputError(
            "E304",
            f"{source} holds no kernels.",
            why="rocprofv3 recorded none into it",
            hint="record with `rocprofv3 --kernel-trace --output-format json`",
        )
    if others := sum(map(_size, processes[:-1])):
        health["events_of_other_processes"] = others
    if 2 * _size(processes[-1]) > limits.events:
        raise refuse_events(source, limits.events)
    return _trace(processes[-1], source, limits, health)


def _size(process: _Process) -> int:
    return len(process.buffer_records.kernel_dispatch)


def _whole(stream: Stream, source: str) -> bytearray:
    data, buffer = bytearray(), bytearray(_CHUNK)
    with memoryview(buffer) as view:
        while number := stream.readinto(view) or 0:
            data += view[:number]
            if len(data) > _MOST_BYTES:
                raise refuse_event_size(source, _MOST_BYTES)
    return data


def _decoded(data: bytearray, source: str) -> _Document:
    try:
        return msgspec.json.decode(data, type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(
            "E302",
            f"{source} begins as a recording of rocprofv3, and cannot be read as one.",
            why=str(error),
            hint="copy the file again; it may have been cut short",
        ) from None


def _trace(process: _Process, source: str, limits: Limits, health: dict[str, int]) -> Trace:
    records = process.buffer_records.kernel_dispatch
    symbols = {each.kernel_id: each for each in process.kernel_symbols}
    called = {number: _name(symbol, limits) for number, symbol in symbols.items()}
    used = [called.get(each.dispatch_info.kernel_id) or "" for each in records]
    if unnamed := used.count(""):
        health["events_without_name"] = unnamed
    names = {name: code for code, name in enumerate(dict.fromkeys((_LAUNCH, *used)))}
    if len(names) > limits.distinct:
        raise refuse_distinct(source, limits.distinct, "names")
    pid = str(process.metadata.pid)
    hosts = [(pid, str(each.thread_id)) for each in records]
    streams = list(_streams(records))
    queues = {place: code for code, place in enumerate(dict.fromkeys(streams))}
    threads = {place: code for code, place in enumerate(dict.fromkeys((*hosts, *streams)))}
    start = np.array([each.start_timestamp for each in records], np.int64)
    end = np.array([each.end_timestamp for each in records], np.int64)
    number = len(records)
    # Every launch, then every kernel; a number for each pair.
    pair = np.tile(np.arange(number), 2)
    empty = np.zeros(2 * number, np.int64)
    product = {each.id.handle: each.product_name for each in process.agents}
    devices = dict.fromkeys(each.dispatch_info.agent_id.handle for each in records)
    return Trace(
        name=_codes([names[_LAUNCH]] * number + [names[name] for name in used]),
        kind=np.repeat(np.array([Kind.RUNTIME, Kind.KERNEL], np.int8), number),
        thread=_codes([threads[place] for place in (*hosts, *streams)]),
        ts=np.tile(start, 2),
        dur=np.concatenate([empty[:number], np.maximum(end - start, 0)]),
        sequence=empty - 1,
        correlation=pair,
        stream=_codes([-1] * number + [queues[place] for place in streams]),
        bytes=empty - 1,
        dims=empty.astype(np.int32),
        names=tuple(names),
        threads=tuple(threads),
        signatures=("",),
        metadata={
            "source": "rocprofv3",
            "deviceProperties": [{"name": product.get(device, "")} for device in devices],
        },
        health=health,
    )


def _name(symbol: _Symbol, limits: Limits) -> str:
    return (symbol.formatted_kernel_name or symbol.kernel_name)[: limits.name_chars]


def _streams(records: list[_Record]) -> Iterator[tuple[str, str]]:
    for each in records:
        where = each.dispatch_info
        yield str(where.agent_id.handle), f"stream {where.queue_id.handle}"


def _codes(values: list[int]) -> Int32:
    return np.array(values, np.int32)
