"""Decoded events of Kineto's to packed columns, a few hundred at a time, and to a trace.

Each field is one list comprehension packed into bytes, the fastest way that plain Python has
(``docs/decisions/0009-trace-reader.md``). A value that does not fit makes its whole chunk take the
slow road, where every event is made to fit first.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from msgspec.structs import asdict, replace

from recompute_scan.trace.columns import (
    Bool,
    Int8,
    Int32,
    Int64,
    Ints,
    Kind,
    Limits,
    Trace,
    refuse,
)
from recompute_scan.trace.health import Numbering, count
from recompute_scan.trace.kineto.schema import (
    EARLIEST,
    KINDS,
    LATEST_US,
    NO_ARGS,
    NO_TIME,
    Args,
    Event,
    nanoseconds,
)
from recompute_scan.trace.streams import Stream, take

# A convolution's work depends on its stride, padding and the like, not on shapes alone.
_CONVOLUTION = "convolution"
_MISFIT = (struct.error, TypeError, AttributeError, OverflowError, ValueError)


# Columns of a few events by their name in `Trace`, as bytes in the machine's order. A kind has 8
# bits; a name, a thread and dims are codes of 32 bits; ts and dur are doubles in µs, or exact ns of
# 64 bits. The others have 32 or 64 bits each, as needed, or no bytes where all are -1.
Packed = dict[str, bytes]


class Codes(dict[Any, int]):
    """Numbers new keys as they come."""

    __slots__ = ()

    def __missing__(self, key: Hashable) -> int:
        self[key] = code = len(self)
        return code

    def forget(self, number: int) -> None:
        """Keep so many keys, and forget those that came later."""
        while len(self) > number:
            self.popitem()


class _Names(Codes):
    """Codes of names, and which of them are convolutions'."""

    __slots__ = ("convolutions",)

    def __init__(self) -> None:
        super().__init__()
        self.convolutions: set[int] = set()

    def __missing__(self, key: Hashable) -> int:
        code = super().__missing__(key)
        if isinstance(key, str) and _CONVOLUTION in key:
            self.convolutions.add(code)
        return code

    def forget(self, number: int) -> None:
        super().forget(number)
        self.convolutions = {code for code in self.convolutions if code < number}


class Packer:
    """Packs events, and numbers their names, threads and shapes.

    Attributes:
        names: Code of each distinct name so far; threads and signatures are the same.
        exact: Whether times come as `Ns` where they had a fraction.
        left_out: Events that were not kept.
        without_args: Operators without arguments.
        uncategorised: Names of events without a category.
        numbering: How many events the recording had, and how many came by.
        after_python: Whether the last event that came by was a Python frame.
    """

    def __init__(
        self, python: bool, health: dict[str, int], within: tuple[int, int] | None = None
    ) -> None:
        self.names = _Names()
        self.threads = Codes()
        self.signatures = Codes({b"": 0})
        self.exact = False
        self.left_out = 0
        self.without_args = 0
        self.uncategorised: list[Any] = []
        self.numbering = Numbering()
        self.after_python = False
        self._python = python
        self._within = within
        self._health = health

    def pack(self, events: Sequence[Event]) -> Packed | None:
        """The columns of the events that have an interval; ``None`` where there are none."""
        timed = [event for event in events if event.ph == "X"]
        known = len(self.names), len(self.threads), len(self.signatures)
        try:
            kinds, kept = self._chosen(timed)
            packed = self._pack(kept, kinds) if kept else None
        except _MISFIT:
            for codes, number in zip(
                (self.names, self.threads, self.signatures), known, strict=True
            ):
                codes.forget(number)
            odd, timed = timed, [_tame(event, {}) for event in timed]
            kinds, kept = self._chosen(timed)
            counted = {id(event) for event in kept}  # events that are passed over do not count
            for event, tame in zip(odd, timed, strict=True):
                if id(tame) in counted:
                    _tame(event, self._health)
            packed = self._pack(kept, kinds) if kept else None
        self.left_out += len(events) - len(kept)
        self.numbering.add([event.args.number if event.args else -1 for event in events])
        if timed:
            self.after_python = KINDS.get(timed[-1].cat) == Kind.PYTHON
        return packed

    def _chosen(self, events: list[Event]) -> tuple[bytes, list[Event]]:
        """Those of the events that are kept, and their kinds."""
        if self._within is not None:
            events = self._overlapping(events, *self._within)
        kinds = bytes([KINDS.get(event.cat, Kind.OTHER) for event in events])
        if self._python or Kind.PYTHON not in kinds:
            return kinds, events
        kept = [event for event, kind in zip(events, kinds, strict=True) if kind != Kind.PYTHON]
        return kinds.replace(bytes([Kind.PYTHON]), b""), kept

    def _overlapping(self, events: list[Event], begin: int, end: int) -> list[Event]:
        """Those of the events that overlap a span of time, ns."""
        # Most are well inside, whatever the rounding of their times, and a comparison shows it.
        first, last = begin / 1000 + 1, end / 1000 - 1
        with suppress(TypeError):
            if not self.exact:
                return [
                    event
                    for event in events
                    if (event.ts < last and first < event.ts + event.dur < LATEST_US)
                    or _overlaps(event, begin, end)
                ]
        return [event for event in events if _overlaps(event, begin, end)]

    def pass_over(self, frames: int) -> None:
        """Note Python frames that were not decoded."""
        self.left_out += frames
        self.numbering.join(frames)
        self.after_python = True

    def _note_missing(self, events: Sequence[Event], args: Sequence[Args], kinds: bytes) -> None:
        """Note operators without arguments and events without a category."""
        bare = [each is NO_ARGS for each in args]
        if True in bare:
            bare = [one and kind == Kind.OP for one, kind in zip(bare, kinds, strict=True)]
        unknown = [e.name for e in events if not e.cat] if Kind.OTHER in kinds else []
        self.without_args += bare.count(True)
        self.uncategorised += unknown

    def _pack(self, events: Sequence[Event], kinds: bytes) -> Packed:
        number = len(events)
        ints = struct.Struct(f"={number}i").pack
        args: list[Args] = [event.args for event in events]  # type: ignore[misc]
        starts = [event.ts for event in events]
        durations = [event.dur for event in events]
        if self.exact:
            starts, durations = [*map(nanoseconds, starts)], [*map(nanoseconds, durations)]
        times = struct.Struct(f"={number}{'q' if self.exact else 'd'}").pack
        ts, dur = times(*starts), times(*durations)
        sequence = _numbers([a.sequence for a in args])
        correlation = _numbers([a.correlation for a in args])
        stream = _numbers([a.stream for a in args], widths="i")
        names = self.names
        codes = [names[event.name] for event in events]
        name = ints(*codes)
        pairs = zip([event.pid for event in events], [event.tid for event in events], strict=True)
        thread = ints(*map(self.threads.__getitem__, pairs))
        shapes: Iterable[tuple[Any, ...]] = zip(
            [a.input_dims for a in args],
            [a.old_input_dims for a in args],
            [a.input_type for a in args],
            strict=True,
        )
        if not names.convolutions.isdisjoint(codes):
            all_of = zip(shapes, args, codes, strict=True)
            shapes = [(*s, a.values) if c in names.convolutions else s for s, a, c in all_of]
        dims = ints(*map(self.signatures.__getitem__, map(b"".join, shapes)))
        self._note_missing(events, args, kinds)
        return {
            "kind": kinds,
            "name": name,
            "thread": thread,
            "dims": dims,
            "ts": ts,
            "dur": dur,
            "sequence": sequence,
            "correlation": correlation,
            "stream": stream,
            "made_by": _numbers([a.made_by or -1 for a in args], widths="i"),
        }


def _overlaps(event: Event, begin: int, end: int) -> bool:
    start = nanoseconds(event.ts)
    return start < end and start + max(0, nanoseconds(event.dur)) > begin


def _numbers(values: list[Any], widths: str = "iq") -> bytes:
    """Whole numbers in the first of these widths that fits all; nothing where all are -1."""
    number = len(values)
    if values.count(-1) == number:
        return b""
    for width in widths[:-1]:
        try:
            return struct.pack(f"={number}{width}", *values)
        except struct.error:
            continue
    return struct.pack(f"={number}{widths[-1]}", *values)


def _tame(event: Event, health: dict[str, int]) -> Event:
    args = event.args or NO_ARGS
    return Event(
        ph="X",
        cat=event.cat if isinstance(event.cat, str) else "",
        name=str(event.name),
        pid=_thread_part(event.pid),
        tid=_thread_part(event.tid),
        ts=_time(event.ts),
        dur=_time(event.dur),
        args=NO_ARGS
        if args is NO_ARGS
        else replace(
            args,
            correlation=_integer(args.correlation, 2**62, health),
            stream=_integer(args.stream, 2**31, health),
            made_by=_integer(args.made_by, 2**31, health),
            sequence=_integer(args.sequence, 2**62, health),
        ),
    )


def _integer(value: Any, end: int, health: dict[str, int]) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 18:
        value = int(value)
    if not isinstance(value, int):
        return -1
    if -(2**31) <= value < end:
        return int(value)
    count(health, "numbers_out_of_range")
    return -1


def _thread_part(value: Any) -> Any:
    return value if isinstance(value, (int, str)) else str(value)


def _time(value: Any) -> Any:
    if isinstance(value, int) and abs(value) < 2**62:
        return value
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")


# So many times wait as doubles before they become nanoseconds together.
_BLOCK = 1 << 15
_NARROW, _WIDE = 4, 8


class Numbers:
    """A column of whole numbers: of 32 bits until one needs 64, and nothing while all are -1."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._width = _NARROW
        self._rows = 0

    def add(self, packed: bytes, rows: int) -> None:
        """Packed numbers of either width, or nothing for so many times -1."""
        width = len(packed) // rows
        if not packed:
            if self._data:
                self._data += self._nothing(rows)
        else:
            if not self._data:
                self._data += self._nothing(self._rows)
            if width > self._width:
                narrow = np.frombuffer(self._data, np.int32)
                self._data = bytearray(narrow.astype(np.int64))
                self._width = _WIDE
            elif width < self._width:
                packed = np.frombuffer(packed, np.int32).astype(np.int64).tobytes()
            self._data += packed
        self._rows += rows

    def finish(self) -> Ints:
        """The column, which is spent."""
        if not self._data:
            # One number, read as many.
            return np.broadcast_to(np.int32(-1), self._rows)
        if self._width == _NARROW:
            narrow: Int32 = np.frombuffer(self._data, np.int32)
            return narrow
        return np.frombuffer(self._data, np.int64)

    def _nothing(self, rows: int) -> bytes:
        return b"\xff" * (rows * self._width)


class Times:
    """A column of times: doubles in µs that become ns a block at a time, or ns as they are."""

    def __init__(self) -> None:
        self._ns = bytearray()
        self._us = bytearray()

    def add(self, packed: bytes, exact: bool) -> None:
        """Packed doubles in µs; or, where they are exact, whole ns of 64 bits."""
        if exact:
            self._flush()
            self._ns += packed
            return
        self._us += packed
        if len(self._us) >= 8 * _BLOCK:
            self._flush()

    def finish(self) -> Int64:
        """All times in ns, ``NO_TIME`` where there was none; the column is spent."""
        self._flush()
        return np.frombuffer(self._ns, np.int64)

    def _flush(self) -> None:
        if not self._us:
            return
        us: np.ndarray[Any, np.dtype[np.float64]] = np.frombuffer(self._us, np.float64)
        usable = np.abs(us) < LATEST_US
        if not usable.all():
            us = np.where(usable, us, 0.0)
        whole = np.floor(us)
        # In two parts: microseconds since 1970 times 1000 do not fit into a double.
        ns = whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000).astype(np.int64)
        ns[~usable] = NO_TIME
        self._ns += ns.tobytes()
        self._us = bytearray()


# The kinds that come first in a file, thread by thread, each thread in the order of time.
_HOST = (Kind.OP, Kind.ANNOTATION)
# Before torch 1.11 user ranges had the category of operators.
_ANNOTATION_PREFIXES = ("ProfilerStep#", "Optimizer.")
# Rows are numbered in 32 bits.
_MOST_ROWS = 2**31 - 1


class Builder:
    """Columns under way. Events go in by :meth:`add`, the trace comes out of :meth:`finish`."""

    def __init__(self, source: str, limits: Limits, packer: Packer, health: dict[str, int]) -> None:
        self.rows = 0
        self.packer = packer
        self._source = source
        self._limits = limits
        self._health = health
        self._plain = {name: bytearray() for name in ("kind", "name", "thread", "dims")}
        self._times = {name: Times() for name in ("ts", "dur")}
        self._numbers = {
            name: Numbers() for name in ("sequence", "correlation", "stream", "made_by")
        }

    def add(self, events: Sequence[Event]) -> None:
        """Take in decoded events; the ones that have an interval are kept.

        Raises:
            InputError: More events (``E313``), distinct texts (``E314``) or threads (``E330``)
                than allowed.
        """
        packed = self.packer.pack(events)
        if packed is None:
            return
        rows = len(packed["kind"])
        for name, column in self._plain.items():
            column.extend(packed[name])
        for name, times in self._times.items():
            times.add(packed[name], self.packer.exact)
        for name, numbers in self._numbers.items():
            numbers.add(packed[name], rows)
        self.rows += rows
        self._check()

    def _check(self) -> None:
        most = min(self._limits.events, _MOST_ROWS)
        if self.rows > most:
            raise refuse("E313", self._source, most)
        packer = self.packer
        if len(packer.threads) > self._limits.threads:
            raise refuse("E330", self._source, self._limits.threads)
        for codes, what in ((packer.names, "names"), (packer.signatures, "input shapes")):
            if len(codes) > self._limits.distinct:
                raise refuse("E314", self._source, self._limits.distinct, what)

    def finish(self, metadata: dict[str, Any], rank: int | None, cut: bool) -> Trace:
        """The trace of all events taken in; the builder is spent.

        ``cut``: the file was cut among its events.
        """
        packer, health = self.packer, self._health
        name, codes, dims = (
            np.frombuffer(self._plain[column], np.int32) for column in ("name", "thread", "dims")
        )
        kind: Int8 = np.frombuffer(self._plain["kind"], np.int8)
        names = _texts(packer.names, self._limits.name_chars, health)
        annotations = np.array([text.startswith(_ANNOTATION_PREFIXES) for text in names], np.bool_)
        if len(names):
            kind[(kind == Kind.OP) & annotations[name]] = Kind.ANNOTATION
        thread, threads = _merge_threads(codes, packer.threads)
        self._count_missing(name, thread, kind, threads)
        ts, dur = (times.finish() for times in self._times.values())
        if (unknown := dur == NO_TIME).any():
            lasting = unknown & (kind != Kind.OTHER)
            count(health, "events_without_duration", int(lasting.sum()))
            dur[unknown] = 0
        if negative := int((dur < 0).sum()):
            count(health, "negative_durations", negative)
            dur[dur < 0] = 0
        trace = Trace(
            name=name,
            kind=kind,
            thread=thread,
            ts=ts,
            dur=dur,
            dims=dims,
            names=names,
            threads=threads,
            signatures=tuple(key.decode(errors="replace") for key in packer.signatures),
            rank=rank,
            metadata=metadata,
            health=health,
            left_out=packer.left_out,
            sequence=_in_range(self._numbers["sequence"], health, lowest=-1),
            correlation=_in_range(self._numbers["correlation"], health),
            stream=_in_range(self._numbers["stream"], health),
            made_by=_in_range(self._numbers["made_by"], health),
        )
        if cut and not packer.after_python and kind[-1] in _HOST:
            trace = replace(trace, cut_at=int(ts[-1]))
        missing = ts < EARLIEST
        if missing.any():
            count(health, "events_without_time", int(missing.sum()))
            trace = _rows(trace, ~missing)
        return _from_zero(trace)

    def _count_missing(
        self, name: Int32, thread: Int32, kind: Int8, threads: Sequence[tuple[str, str]]
    ) -> None:
        """Count calls that lack what the others have: a name, a place, a category, arguments."""
        packer, health = self.packer, self._health
        host = kind <= Kind.RUNTIME
        unnamed = np.array([not text for text in packer.names], np.bool_)
        nowhere = np.array([not {"-1", "", "None"}.isdisjoint(pair) for pair in threads], np.bool_)
        if unnamed.any():
            count(health, "events_without_name", int((unnamed[name] & host).sum()))
        if nowhere.any() and not nowhere.all():
            count(health, "events_without_thread", int((nowhere[thread] & host).sum()))
        operators = set(name[kind == Kind.OP].tolist()) if packer.uncategorised else set()
        lost = sum(packer.names.get(text) in operators for text in packer.uncategorised)
        count(health, "events_without_category", lost)
        if packer.without_args < np.count_nonzero(kind == Kind.OP):
            known = health.get("args_dropped", 0)
            count(health, "events_without_args", max(0, packer.without_args - known))


def _in_range(column: Numbers, health: dict[str, int], lowest: int = -(2**31)) -> Ints:
    numbers = column.finish()
    odd = numbers < lowest
    if numbers.dtype == np.int64:
        odd |= numbers >= 2**62
    if odd.any():
        count(health, "numbers_out_of_range", int(odd.sum()))
        numbers[odd] = -1
    return numbers


def _texts(codes: Iterable[Any], most: int, health: dict[str, int]) -> tuple[str, ...]:
    texts = tuple(str(key) for key in codes)
    if long := sum(len(text) > most for text in texts):
        count(health, "names_shortened", long)
        texts = tuple(text[:most] for text in texts)
    return texts


def _merge_threads(
    codes: Int32, pairs: Iterable[tuple[Any, Any]]
) -> tuple[Int32, tuple[tuple[str, str], ...]]:
    """Threads as text; a thread written as a number here and as text there is one thread."""
    merged: Codes = Codes()
    renumbered = [merged[str(pid), str(tid)] for pid, tid in pairs]
    if len(merged) < len(renumbered):
        codes = np.array(renumbered, np.int32)[codes]
    return codes, tuple(merged)


def _from_zero(trace: Trace) -> Trace:
    """The trace, with its clock set so that no time is negative."""
    moved = -int(trace.ts.min(initial=0))
    if not moved:
        return trace
    cut_at = None if trace.cut_at is None else trace.cut_at + moved
    return replace(trace, ts=trace.ts + moved, cut_at=cut_at, moved=moved)


def _rows(trace: Trace, kept: Bool) -> Trace:
    columns = ((name, one) for name, one in asdict(trace).items() if isinstance(one, np.ndarray))
    return replace(trace, **{name: column[kept] for name, column in columns})


class Window:
    """The bytes from ``FIRST`` to ``end`` of ``data``; the byte before them is kept free.

    It holds ``size`` bytes, and grows while a single event does not fit.
    """

    FIRST = 1

    def __init__(self, stream: Stream, size: int, source: str, limits: Limits) -> None:
        self.data = bytearray(size + self.FIRST)
        self.end = self.FIRST
        self.ended = False
        # How many bytes of the stream were taken in.
        self._taken = 0
        self._stream = stream
        self._source = source
        self._limit = limits.event_bytes

    def fill(self) -> None:
        """Read until the buffer is full or the stream ends."""
        with memoryview(self.data) as view:
            while self.end < len(view) and not self.ended:
                number = self._stream.readinto(view[self.end :]) or 0
                self.end += number
                self._taken += number
                self.ended = number == 0

    def grow(self) -> None:
        """Make the buffer twice as large and fill it.

        Raises:
            InputError: It would hold more than one event may take (``E315``).
        """
        if len(self.data) > self._limit:
            raise refuse("E315", self._source, self._limit)
        data = bytearray(2 * len(self.data))
        data[: self.end] = memoryview(self.data)[: self.end]
        self.data = data
        self.fill()

    def drop(self, position: int) -> None:
        """Forget what is before ``position`` and fill up behind."""
        left = self.end - position
        self.data[self.FIRST : self.FIRST + left] = self.data[position : self.end]
        self.end = self.FIRST + left
        self.fill()

    @property
    def position(self) -> int:
        """Where in the stream the bytes begin that are held."""
        return self._taken - (self.end - self.FIRST)

    def rest(self) -> bytes:
        """All bytes that are held."""
        return bytes(memoryview(self.data)[self.FIRST : self.end])

    def behind(self, most: int) -> bytes:
        """Up to ``most`` bytes that follow those that are held."""
        if self.ended:
            return b""
        data = take(self._stream, most)
        self.ended |= len(data) < most
        return data

    def drain(self) -> int:
        """Read the stream to its end and forget it; the number of bytes not held before."""
        scratch = memoryview(bytearray(1 << 16))
        total = 0
        while not self.ended:
            number = self._stream.readinto(scratch) or 0
            total += number
            self.ended = number == 0
        return total
