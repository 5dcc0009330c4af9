"""Kineto's JSON written again as a Perfetto trace, in the way that torch's own writer does.

Packets, their order and their field numbers are those of torch's
``torch/csrc/profiler/cupti/monitor_pftrace.cpp`` and ``torch/profiler/_cupti/monitor_trace.py``:
tracks; all names, numbered; for each group of events all their beginnings, then all their ends;
what the GPU did as render stages (or, as in its first version, as slices). The installed torch has
no such writer.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterable, Sequence
from typing import Any

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_ELSEWHERE = (*_DEVICE, *_CALLS, "gpu_user_annotation", "cuda_sync", "overhead", "Trace")
_STAGES = {"kernel": (1, "Kernel"), "gpu_memcpy": (2, "Memcpy"), "gpu_memset": (3, "Memset")}
_QUEUES = 100
SEQUENCE = 1


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def double(field: int, value: float) -> bytes:
    return varint(field << 3 | 1) + struct.pack("<d", value)


def piece(field: int, content: bytes | str) -> bytes:
    data = content.encode() if isinstance(content, str) else content
    return varint(field << 3 | 2) + varint(len(data)) + data


def packet(content: bytes) -> bytes:
    return piece(1, content)


def track(uuid: int, pid: int, tid: int | None = None, name: str = "", parent: int = 0) -> bytes:
    what = piece(4, number(1, pid) + number(2, tid) + piece(5, name)) if tid is not None else b""
    what = what or piece(3, number(1, pid) + piece(6, name))
    return packet(piece(60, number(1, uuid) + (number(5, parent) if parent else b"") + what))


def names(texts: Sequence[str], further: bytes = b"") -> bytes:
    entries = [piece(2, number(1, place) + piece(2, text)) for place, text in enumerate(texts, 1)]
    return packet(number(10, SEQUENCE) + number(13, 1) + piece(12, b"".join(entries) + further))


def begin(time: int, uuid: int, name: int, *beside: bytes) -> bytes:
    event = number(9, 1) + number(11, uuid) + number(10, name) + b"".join(beside)
    return packet(number(8, time) + number(10, SEQUENCE) + number(13, 2) + piece(11, event))


def end(time: int, uuid: int) -> bytes:
    event = number(9, 2) + number(11, uuid)
    return packet(number(8, time) + number(10, SEQUENCE) + piece(11, event))


def beside(name: str, value: Any) -> bytes:
    return piece(4, piece(10, name) + _value(value))


def _value(value: Any) -> bytes:
    if isinstance(value, dict):
        return b"".join(piece(11, piece(10, key) + _value(each)) for key, each in value.items())
    if isinstance(value, list):
        return b"".join(piece(12, _value(each)) for each in value)
    if isinstance(value, bool):
        return number(2, int(value))
    if isinstance(value, float):
        return double(5, value)
    if isinstance(value, int):
        return number(4, value)
    return piece(6, "null" if value is None else str(value))


class Writer:
    """One trace under way.

    Args:
        document: What Kineto wrote, decoded.
        stages: Whether the GPU's work becomes render stages, as it does today.
    """

    def __init__(self, document: dict[str, Any], *, stages: bool = True) -> None:
        self._base = int(document.get("baseTimeNanoseconds") or 10**18)
        self._events = [e for e in document["traceEvents"] if e.get("ph") == "X"]
        self._stages = stages
        self._names: dict[str, int] = {}
        self._tracks: dict[tuple[Any, Any], int] = {}
        self._described: list[bytes] = []
        self._further = b""

    def write(self) -> bytes:
        """The trace, uncompressed."""
        host = [e for e in self._events if e.get("cat") not in _ELSEWHERE]
        body = self._group(host, sort=True)
        for category in (*_CALLS, "overhead", "cuda_sync"):
            body += self._group([e for e in self._events if e.get("cat") == category])
        device = [e for e in self._events if e.get("cat") in _DEVICE]
        body += self._render(device) if self._stages else self._group(device)
        texts = sorted(self._names, key=self._names.__getitem__)
        return b"".join(self._described) + names(texts, self._further) + body

    def _group(self, events: Iterable[dict[str, Any]], *, sort: bool = False) -> bytes:
        opened, closed = bytearray(), bytearray()
        for event in events:
            start, stop = self._span(event)
            uuid = self._track(event["pid"], event["tid"])
            args = event.get("args") or {}
            if event.get("cat") in _CALLS:
                args = {"cbid": args.get("cbid", 0), "correlation": args.get("correlation", 0)}
            if sort:  # the JSON library that it goes through sorts keys
                args = dict(sorted(args.items()))
            values = [beside(key, value) for key, value in args.items()]
            opened += begin(start, uuid, self._name(event["name"]), *values)
            closed += end(stop, uuid)
        return bytes(opened + closed)

    def _render(self, events: list[dict[str, Any]]) -> bytes:
        streams = sorted({int(e["args"]["stream"]) for e in events})
        width = len(str(max(streams, default=0)))
        specs = [*_STAGES.values()]
        specs += [(_QUEUES + n, f"stream {each:0{width}d}") for n, each in enumerate(streams)]
        self._further = b"".join(piece(24, number(1, i) + piece(2, text)) for i, text in specs)
        found = bytearray()
        for event in events:
            start, stop = self._span(event)
            args = event["args"]
            stage = number(1, args["correlation"]) + number(2, stop - start)
            stage += number(11, int(args.get("device", 0)))
            stage += number(13, _QUEUES + streams.index(int(args["stream"])))
            stage += number(14, _STAGES[event["cat"]][0]) + number(5, 1)
            if event["cat"] == "kernel":
                stage += number(20, self._name(event["name"])) + number(19, 1)
            stage += piece(6, piece(1, "stream id") + piece(2, str(args["stream"])))
            found += packet(
                number(8, start) + number(10, SEQUENCE) + number(13, 2) + piece(53, stage)
            )
        return bytes(found)

    def _span(self, event: dict[str, Any]) -> tuple[int, int]:
        start = self._base + round(event["ts"] * 1000)
        return start, start + round(event.get("dur", 0) * 1000)

    def _name(self, text: str) -> int:
        return self._names.setdefault(str(text), len(self._names) + 1)

    def _track(self, pid: Any, tid: Any) -> int:
        for key in ((pid, None), (pid, tid)):
            if key not in self._tracks:
                uuid = self._tracks[key] = len(self._tracks) + 1
                parent = self._tracks[pid, None]
                thread = None if key[1] is None else int(tid)
                self._described.append(
                    track(uuid, int(pid), thread, str(tid), parent if parent != uuid else 0)
                )
        return self._tracks[pid, tid]


def pftrace(document: dict[str, Any], *, stages: bool = True, packed: bool = True) -> bytes:
    """The same recording as a Perfetto trace, in gzip as torch leaves it if ``packed``."""
    data = Writer(document, stages=stages).write()
    return gzip.compress(data, 1) if packed else data
