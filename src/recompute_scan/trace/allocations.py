"""Allocations in a trace, and snapshots of torch's allocator.

The allocations of a trace with ``profile_memory=True`` are instant events, which :class:`Trace`
does not hold: two for each tensor would double a trace, and most questions do not need them. They
are read apart, and only where the trace's head has ``profile_memory``
(``torch/profiler/profiler.py``).

The allocator's history ends with the snapshot. Walked backwards from the blocks in use at its end,
an allocation is a block that was not there before, and a completed release one that was.
``torch/csrc/cuda/memory_snapshot.cpp`` names the fields, and ``torch/cuda/_memory_viz.py`` reads
them.

A snapshot is a pickle of plain values. :class:`pickle.Unpickler` reads it, and refuses whatever
names a class, a function, an extension or a persistent object. Before that, :mod:`pickletools`
lists the opcodes, to bound what the unpickler does not:

- the number of values: so many opcodes;
- sizes: a text or number must be in the file, where the unpickler allocates first and then reads;
- the memo: places are given in order, where the unpickler makes room for the largest one;
- keys: a number has at most 64 bits, so that few can share a hash, and a tuple holds numbers alone,
  so that its hash is neither deep nor exponential. Other values that nest cannot be keys.

Nesting needs no bound: the unpickler does not recurse.
"""

from __future__ import annotations

import errno
import io
import pickle
import pickletools
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
from msgspec import Struct, field

from recompute_scan.errors import InputError
from recompute_scan.files import content, opened
from recompute_scan.trace.columns import DEFAULT_LIMITS, Int32, Int64, Limits, Trace, refuse
from recompute_scan.trace.kineto.schema import EARLIEST, UNREADABLE, exact_time, nanoseconds
from recompute_scan.trace.streams import inflate, is_zip

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
        allocated: Bytes allocated on the device after it, or -1. On the host, bytes allocated
            while any profiler of the process recorded.
        reserved: Bytes of the device that torch holds after it, or -1.
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
    """The allocations in the file of a loaded trace; ``None`` where it has none.

    Archives and remote addresses are not looked into.

    Raises:
        InputError: More events than allowed (``E313``), or beyond another limit.
        OSError: It cannot be read.
    """
    if not trace.metadata.get("profile_memory") or not path.is_file() or is_zip(path):
        return None
    rows: list[tuple[int, int, int, int, int]] = []
    for event in _events(path, limits):
        ts, args = nanoseconds(event.ts), event.args
        if ts < EARLIEST or max(map(abs, (args.size, args.allocated, args.reserved))) > _MOST:
            continue
        device = args.device if 0 <= args.device < 2**15 else -1
        rows.append((ts + trace.moved, device, args.size, args.allocated, args.reserved))
        if len(rows) > limits.events:
            raise refuse("E313", str(path), limits.events)
    return allocations(rows) if rows else None


def allocations(rows: Sequence[tuple[int, int, int, int, int]]) -> Allocations:
    """From rows of the fields of :class:`Allocations`, in any order."""
    table = np.array(rows, np.int64).reshape(-1, 5)
    table = table[table[:, 0].argsort(kind="stable")]
    ts, device, size, allocated, reserved = table.T
    return Allocations(ts, device.astype(np.int32), size, allocated, reserved)


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


# Bits of a number of the allocator.
_LONGEST_NUMBER = 64
_NUMBERS = frozenset("BININT BININT1 BININT2 LONG1 LONG4".split())
_MEMO = frozenset("MEMOIZE BINPUT LONG_BINPUT".split())
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
# The other opcodes that make texts, numbers, lists and dictionaries.
_PLAIN = frozenset(
    "PROTO FRAME MARK STOP NONE NEWTRUE NEWFALSE BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 "
    "SHORT_BINSTRING BINGET LONG_BINGET EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS "
    "EMPTY_TUPLE".split()
)
# Those that look something up or call it.
_CODE = frozenset(
    "GLOBAL STACK_GLOBAL REDUCE BUILD INST OBJ NEWOBJ NEWOBJ_EX EXT1 EXT2 EXT4 PERSID "
    "BINPERSID".split()
)


class _Code(Exception):
    """An opcode that would run something."""


class _Wrong(Exception):
    """The bytes are no pickle of plain values, or no snapshot: why, a part of a sentence."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise _Code("GLOBAL")

    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise _Code("PERSID")


def read_plain(data: bytes, source: str, limits: Limits) -> Any:
    """The value in a pickle; ``limits.events`` bounds the opcodes, ten for each event.

    Raises:
        InputError: It asks for code to be run (``E341``), is no pickle of plain values
            (``E342``), or holds too much (``E313``).
    """
    try:
        # Python warns of backslashes in texts of the oldest protocol.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            few = _few_and_plain(data, 10 * limits.events)
        if not few:
            raise refuse("E313", source, limits.events)
        file = io.BytesIO(data)
        return _PlainUnpickler(file, encoding="utf-8", errors="replace").load()
    except _Wrong as wrong:
        raise refuse_snapshot(source, str(wrong)) from None
    except _Code as code:
        raise InputError(
            "E341",
            f"{source} is a pickle that runs code, and was not opened.",
            why=f"it has the opcode {code}; a memory snapshot has lists, strings and numbers only",
            hint="torch.cuda.memory._dump_snapshot(FILE) writes a snapshot; do not unpickle this "
            "file unless you know where it is from",
        ) from None
    except (
        *(pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError),
        *(OverflowError, MemoryError),
    ):
        raise refuse_snapshot(source, "it is cut off or damaged") from None


def refuse_snapshot(source: str, why: str) -> InputError:
    """``E342``: it is no memory snapshot."""
    return InputError(
        "E342",
        f"{source} is a pickle, but not a memory snapshot.",
        why=why,
        hint="give a file that torch.cuda.memory._dump_snapshot(FILE) wrote",
    )


def _few_and_plain(data: bytes, most: int) -> bool:
    """Whether there are at most so many opcodes; others than plain ones are refused."""
    numbers, behind_mark, last = 0, False, ""
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if count >= most:
            return False
        if name in _NUMBERS:
            behind_mark = last == "MARK" if not numbers else behind_mark
            numbers += 1
            if int(argument or 0).bit_length() > _LONGEST_NUMBER:
                raise _Wrong("one of its numbers is too long")
        elif name in _MEMO:
            if argument is not None and argument > count:
                raise _Wrong("it is damaged")
        else:
            if name in _TUPLES or name == "TUPLE":
                if numbers < _TUPLES.get(name, 0) or (name == "TUPLE" and not behind_mark):
                    raise _Wrong("one of its tuples holds more than numbers")
            elif name in _CODE:
                raise _Code(name)
            elif name not in _PLAIN:
                raise _Wrong(f"it has the opcode {name}, which no snapshot has")
            numbers, behind_mark = 0, False
        last = name
    return True


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
    value = read_plain(data, source, limits)
    # Before torch 2.0 a snapshot was the list of segments alone.
    whole = {"segments": value} if isinstance(value, list) else value
    try:
        return list(_Parsed(source, limits).devices(whole))
    except _Wrong as wrong:
        raise refuse_snapshot(source, str(wrong)) from None


class _Parsed:
    def __init__(self, source: str, limits: Limits) -> None:
        self._source = source
        self._left = limits.events
        self._limits = limits
        # A list that is there many times is one list, kept by the pickle's own value.
        self._stacks: dict[int, Stack] = {}

    def devices(self, whole: Any) -> Iterator[DeviceHistory]:
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
                raise _Wrong("its sizes exceed any device's memory")
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
        for at, block in live.items():
            known = block.stack or at not in asked
            stack = block.stack if known else self._stack(asked[at])
            history.blocks.append(MemoryBlock(block.size, stack))

    def _back(self, now: dict[int, MemoryBlock], event: dict[Any, Any], total: int) -> int:
        """Undo one event; the bytes in use before it."""
        address, action = _number(event, "addr", 0), event.get("action")
        if action not in ("alloc", "free_completed"):
            return total
        gone = now.pop(address, None)
        total -= gone.size if gone is not None else 0
        if action == "alloc":
            return total
        now[address] = MemoryBlock(_number(event, "size"), ())
        return total + now[address].size

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
                raise refuse("E313", self._source, self._limits.events)
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
