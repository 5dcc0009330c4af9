"""A snapshot as blocks and events, and what was alive when most memory was.

The allocator's history ends with the snapshot. Walked backwards from the blocks that are in use
at its end, an allocation is a block that was not there before, and a completed release one that
was. ``torch/cuda/_memory_viz.py`` reads the same fields; names of fields are those of
``torch/csrc/cuda/memory_snapshot.cpp``.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from recompute_scan.errors import InputError
from recompute_scan.files import content
from recompute_scan.trace.limits import DEFAULT_LIMITS, Limits, refuse_events
from recompute_scan.trace.snapshots.plain_pickle import read_plain, refuse_snapshot

_MOST_BYTES = 2**62
# Deeper stacks are cut: torch itself keeps fewer.
_MOST_FRAMES = 2000
# Larger files would take minutes and tens of GB.
_LARGEST_FILE = 2 * 2**30


class StackFrame(Struct, frozen=True):
    """One frame of a stack, Python's or C++'s."""

    file: str
    line: int
    name: str


Stack = tuple[StackFrame, ...]


class MemoryBlock(Struct, frozen=True):
    """Memory in use: bytes asked for, and the stack that did, innermost first; empty if unknown."""

    size: int
    stack: Stack


class DeviceHistory(Struct):
    """One device of a snapshot.

    Attributes:
        device: Its number.
        reserved: Bytes that the allocator holds of the device at the end.
        in_use: Bytes in use at the end.
        peak: Most bytes in use at any time that the history shows.
        events: Allocations and releases that it holds.
        out_of_memory: Requests that failed.
        blocks: What was in use at the peak.
    """

    device: int
    reserved: int = 0
    in_use: int = 0
    peak: int = 0
    events: int = 0
    out_of_memory: int = 0
    blocks: list[MemoryBlock] = field(default_factory=list)


def read_snapshot(path: Path, limits: Limits = DEFAULT_LIMITS) -> list[DeviceHistory]:
    """The devices of a snapshot that have memory in use, or had.

    Raises:
        InputError: The file cannot be read (``E301``), would run code (``E341``), is no snapshot
            (``E342``), or is beyond a limit (``E313``).
    """
    try:
        data = content(path, min(_LARGEST_FILE, limits.inflated_bytes))
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise refuse_snapshot(str(path), "it is larger than 2 GB") from None
        raise InputError("E301", f"Cannot read {path}.", why=error.strerror) from None
    return parse_snapshot(data, str(path), limits)


def parse_snapshot(
    data: bytes, source: str, limits: Limits = DEFAULT_LIMITS
) -> list[DeviceHistory]:
    """The same of the bytes of a file; see :func:`read_snapshot`."""
    return _Parsed(source, limits).devices(read_plain(data, source, limits))


class _Wrong(Exception):
    """A value is not what a snapshot has there."""


class _Parsed:
    def __init__(self, source: str, limits: Limits) -> None:
        self._source = source
        self._left = limits.events
        self._limits = limits
        # A list that is there many times is one list, kept by the pickle's own value.
        self._stacks: dict[int, Stack] = {}

    def devices(self, value: Any) -> list[DeviceHistory]:
        try:
            # Before torch 2.0 a snapshot was the list of segments alone.
            whole = {"segments": value} if isinstance(value, list) else value
            return list(self._devices(whole))
        except _Wrong as wrong:
            raise refuse_snapshot(self._source, str(wrong)) from None

    def _devices(self, whole: Any) -> Iterator[DeviceHistory]:
        if not isinstance(whole, dict) or "segments" not in whole:
            raise _Wrong("it has no segments")
        live: dict[int, dict[int, MemoryBlock]] = {}
        reserved: dict[int, int] = {}
        for segment in self._dicts(whole["segments"], "segments"):
            device = _number(segment, "device", 0)
            reserved[device] = reserved.get(device, 0) + _number(segment, "total_size")
            at = _number(segment, "address", 0)
            for block in self._dicts(segment.get("blocks"), "blocks"):
                size = _number(block, "size")
                address = _number(block, "address", at)
                if _text(block, "state").startswith("active"):
                    asked, stack = self._asked(block, size)
                    live.setdefault(device, {})[address] = MemoryBlock(asked, stack)
                at = address + size
        traces = whole.get("device_traces", [])
        if not isinstance(traces, list):
            raise _Wrong("device_traces is no list")
        for device in sorted({*live, *reserved, *(n for n, one in enumerate(traces) if one)}):
            history = DeviceHistory(device, reserved.get(device, 0))
            events = traces[device] if device < len(traces) else []
            self._walk(history, live.get(device, {}), list(self._dicts(events, "device_traces")))
            if max(device, history.reserved, history.peak) > _MOST_BYTES:
                raise _Wrong("its numbers add up to more than a device has")
            yield history

    def _asked(self, block: dict[Any, Any], size: int) -> tuple[int, Stack]:
        """Bytes asked for, and the stack: the block's own, or up to torch 2.0 its history's."""
        asked, stack = _number(block, "requested_size", size), self._stack(block)
        history = block.get("history")
        if not stack and isinstance(history, list) and history and isinstance(history[0], dict):
            asked = _number(history[0], "real_size", asked)
            stack = self._stack(history[0])
        return asked, stack

    def _walk(
        self, history: DeviceHistory, live: dict[int, MemoryBlock], events: list[dict[Any, Any]]
    ) -> None:
        total = sum(block.size for block in live.values())
        history.in_use = history.peak = total
        best = len(events)
        now = dict(live)
        for place in range(len(events) - 1, -1, -1):
            event = events[place]
            action = event.get("action")
            if action == "oom":
                history.out_of_memory += 1
            elif action in ("alloc", "free_completed"):
                history.events += 1
                total = self._back(now, event, total)
                if total > history.peak:
                    history.peak, best = total, place
        for place in range(len(events) - 1, best - 1, -1):
            self._back(live, events[place], 0)
        asked = {_number(e, "addr", 0): e for e in events[:best] if e.get("action") == "alloc"}
        history.blocks = [
            block
            if block.stack or at not in asked
            else MemoryBlock(block.size, self._stack(asked[at]))
            for at, block in live.items()
        ]

    def _back(self, now: dict[int, MemoryBlock], event: dict[Any, Any], total: int) -> int:
        """Undo one event; the bytes in use before it."""
        address, action = _number(event, "addr", 0), event.get("action")
        if action not in ("alloc", "free_completed"):
            return total
        if action == "alloc":
            gone = now.pop(address, None)
            return total - gone.size if gone is not None else total
        size = _number(event, "size")
        before = now.get(address)
        now[address] = MemoryBlock(size, ())
        return total + size - (before.size if before is not None else 0)

    def _stack(self, owner: dict[Any, Any]) -> Stack:
        frames = owner.get("frames")
        if frames is None:
            return ()
        if not isinstance(frames, list):
            raise _Wrong("frames is no list")
        known = self._stacks.get(id(frames))
        if known is None:
            known = self._stacks[id(frames)] = tuple(
                StackFrame(_text(one, "filename"), _number(one, "line", 0), _text(one, "name"))
                for one in self._dicts(frames[:_MOST_FRAMES], "frames")
            )
        return known

    def _dicts(self, values: Any, what: str) -> Iterator[dict[Any, Any]]:
        if not isinstance(values, (list, tuple)):
            raise _Wrong(f"{what} is no list")
        for value in values:
            if not isinstance(value, dict):
                raise _Wrong(f"an entry of {what} is no dictionary")
            self._left -= 1
            if self._left < 0:
                raise refuse_events(self._source, self._limits.events)
            yield value


def _number(owner: dict[Any, Any], key: str, otherwise: int | None = None) -> int:
    value = owner.get(key, otherwise)
    if type(value) is not int or not 0 <= value <= 4 * _MOST_BYTES:
        raise _Wrong(f"{key} is no number that an allocator has")
    return value


def _text(owner: dict[Any, Any], key: str) -> str:
    value = owner.get(key, "")
    if not isinstance(value, str):
        raise _Wrong(f"{key} is no text")
    # A pickle may hold halves of surrogate pairs, which cannot be written.
    return value[:1000].encode(errors="replace").decode()
