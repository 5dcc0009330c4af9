"""The allocations of a trace that was recorded with ``profile_memory=True``.

They are instant events, of which the columns of :class:`Trace` hold none: two for each tensor
would double a trace that most questions do not need them for. They are read apart, and only where
the trace's head says that there are some (``profile_memory``, ``torch/profiler/profiler.py``).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from recompute_scan.files import opened
from recompute_scan.trace.archive import is_zip
from recompute_scan.trace.columns import Int32, Int64, Trace
from recompute_scan.trace.kineto.schema import NO_TIME, UNREADABLE, exact_time, nanoseconds
from recompute_scan.trace.limits import DEFAULT_LIMITS, Limits, refuse_events
from recompute_scan.trace.streams import inflate

_NAME = b'"[memory]"'
_CHUNK = 1 << 20
# An event is shorter than this; one cut by the end of a chunk is read again with the next.
_LONGEST = 4096
_MOST = 2**62


class Allocations(Struct, frozen=True):
    """Allocations and releases of memory, in order of time; one entry each.

    Attributes:
        ts: When, ns on the trace's clock.
        device: Number of the GPU, -1 for the host.
        size: Bytes; negative where they are released.
        allocated: What the device has allocated after it, bytes; -1 where not told. On the
            host, what was allocated while any profiler of the process recorded.
        reserved: What torch holds of the device after it, bytes; -1 where not told.
    """

    ts: Int64
    device: Int32
    size: Int64
    allocated: Int64
    reserved: Int64

    def __len__(self) -> int:
        return len(self.ts)


class _Args(msgspec.Struct, gc=False):
    size: int = msgspec.field(name="Bytes")
    device: int = msgspec.field(default=-1, name="Device Id")
    allocated: int = msgspec.field(default=-1, name="Total Allocated")
    reserved: int = msgspec.field(default=-1, name="Total Reserved")


class _Event(msgspec.Struct, gc=False):
    ts: Any
    args: _Args


_decode = msgspec.json.Decoder(_Event, float_hook=exact_time).decode


def read_allocations(
    path: Path, trace: Trace, limits: Limits = DEFAULT_LIMITS
) -> Allocations | None:
    """The allocations in a trace's file; ``None`` where it has none, or is no plain file.

    Args:
        path: The file, plain or compressed; archives and remote addresses are not looked into.
        trace: What was loaded from it.
        limits: What is refused.

    Raises:
        InputError: More events than allowed (``E313``), or beyond another limit.
        OSError: It cannot be read.
    """
    if not trace.metadata.get("profile_memory") or not path.is_file() or is_zip(path):
        return None
    rows: list[tuple[int, int, int, int, int]] = []
    for event in _events(path, limits):
        ts, args = nanoseconds(event.ts), event.args
        if ts == NO_TIME or max(map(abs, (args.size, args.allocated, args.reserved))) > _MOST:
            continue
        device = args.device if 0 <= args.device < 2**15 else -1
        rows.append((ts, device, args.size, args.allocated, args.reserved))
        if len(rows) > limits.events:
            raise refuse_events(str(path), limits.events)
    return allocations(rows) if rows else None


def allocations(rows: Sequence[tuple[int, int, int, int, int]]) -> Allocations:
    """From rows of the fields of :class:`Allocations`, in any order."""
    table = np.array(rows, np.int64).reshape(-1, 5)
    table = table[table[:, 0].argsort(kind="stable")]
    ts, device, size, allocated, reserved = table.T
    return Allocations(
        ts=ts,
        device=device.astype(np.int32),
        size=size,
        allocated=allocated,
        reserved=reserved,
    )


def _events(path: Path, limits: Limits) -> Iterator[_Event]:
    buffer = bytearray(_CHUNK + _LONGEST)
    kept = 0
    with opened(path, buffering=0) as file:
        stream, _ = inflate(file, str(path), limits, {})
        while number := stream.readinto(memoryview(buffer)[kept:]):
            end = kept + number
            rest = yield from _events_in(buffer, end)
            rest = max(rest, end - _LONGEST)
            kept = end - rest
            buffer[:kept] = buffer[rest:end]


def _events_in(buffer: bytearray, end: int) -> Generator[_Event, None, int]:
    """The whole events before ``end``; returns where what may be cut begins."""
    done = 0
    at = buffer.find(_NAME, 0, end)
    while at >= 0:
        first = buffer.rfind(b"{", done, at)
        inner = buffer.find(b"}", at, end)
        last = buffer.find(b"}", inner + 1, end) if inner >= 0 else -1
        if last < 0:
            return first if first >= 0 else at
        if first >= 0:
            with suppress(*UNREADABLE):
                yield _decode(memoryview(buffer)[first : last + 1])
        done = last + 1
        at = buffer.find(_NAME, done, end)
    return max(done, end - _LONGEST)
