"""Decoded events to packed columns, a few hundred events at a time.

Each field is one list comprehension packed into bytes, the fastest way that plain Python has
(``docs/decisions/trace-reader.md``). A value that does not fit makes its whole chunk take the
slow road, where every event is made to fit first.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from recompute_scan.trace.health import Numbering, count
from recompute_scan.trace.kineto.schema import (
    KINDS,
    LATEST_US,
    NO_ARGS,
    Args,
    Event,
    Kind,
    nanoseconds,
)

# What a convolution does depends on its stride, padding and the like, not on shapes alone.
_CONVOLUTION = "convolution"
_MISFIT = (struct.error, TypeError, AttributeError, OverflowError, ValueError)


class Packed(msgspec.Struct, gc=False, array_like=True):
    """Columns of a few events, as bytes in the machine's own order.

    Attributes:
        rows: How many events.
        kind: A :class:`Kind` each, of 8 bits.
        name: Code each, of 32 bits; so are ``thread`` and ``dims``.
        ts: Start, a double in µs each; with ``exact``, ns of 64 bits. ``dur`` is the same.
        sequence: 32 or 64 bits each, as needed, or nothing where all are -1; so are
            ``correlation`` and ``stream``.
    """

    rows: int
    exact: bool
    kind: bytes
    name: bytes
    thread: bytes
    dims: bytes
    ts: bytes
    dur: bytes
    sequence: bytes
    correlation: bytes
    stream: bytes


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


class _KindCodes(dict[Any, int]):
    __slots__ = ()

    def __missing__(self, key: Hashable) -> int:
        return int(Kind.OTHER)


class Packer:
    """Packs events, and numbers their names, threads and shapes.

    Args:
        python: Whether to keep ``python_function`` events.
        health: Counters to add to.
        within: Keep only what overlaps this span of time, ns.

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
        self._kinds = _KindCodes({name: int(kind) for name, kind in KINDS.items()})

    def pack(self, events: Sequence[Event]) -> Packed | None:
        """The columns of these events, of which only those with an interval are kept."""
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
            counted = {id(event) for event in kept}  # of what is passed over, nothing counts
            for event, tame in zip(odd, timed, strict=True):
                if id(tame) in counted:
                    _tame(event, self._health)
            packed = self._pack(kept, kinds) if kept else None
        self.left_out += len(events) - len(kept)
        self.numbering.add([event.args.number if event.args else -1 for event in events])
        if timed:
            self.after_python = self._kinds[timed[-1].cat] == Kind.PYTHON
        return packed

    def _chosen(self, events: list[Event]) -> tuple[bytes, list[Event]]:
        """Those of the events that are kept, and their kinds."""
        if self._within is not None:
            events = self._overlapping(events, *self._within)
        kinds = bytes([self._kinds[event.cat] for event in events])
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
        return Packed(
            rows=number,
            exact=self.exact,
            kind=kinds,
            name=name,
            thread=thread,
            dims=dims,
            ts=ts,
            dur=dur,
            sequence=sequence,
            correlation=correlation,
            stream=stream,
        )


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
        else Args(
            correlation=_integer(args.correlation, 2**62, health),
            stream=_integer(args.stream, 2**31, health),
            input_type=args.input_type,
            input_dims=args.input_dims,
            old_input_dims=args.old_input_dims,
            sequence=_integer(args.sequence, 2**62, health),
            values=args.values,
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
