"""Decoded events to columns, a few hundred events at a time.

Each field is one list comprehension packed into a growing buffer, the fastest way that plain
Python has (``docs/decisions/trace-reader.md``). A value that does not fit makes its whole chunk
take the slow road, where every event is made to fit first.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from recompute_scan.trace.columns import Kind, Trace
from recompute_scan.trace.health import count
from recompute_scan.trace.limits import Limits, refuse_distinct, refuse_events
from recompute_scan.trace.schema import NO_ARGS, Args, Event
from recompute_scan.trace.times import NO_TIME, Times, nanoseconds

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
# The kinds that come first in a file, thread by thread, each thread in the order of time.
_HOST = (Kind.OP, Kind.ANNOTATION)
# Before torch 1.11 user ranges had the category of operators.
_ANNOTATION_PREFIXES = ("ProfilerStep#", "Optimizer.")
# What a convolution does depends on its stride, padding and the like, not on shapes alone.
_CONVOLUTION = "convolution"
_MISFIT = (struct.error, TypeError, AttributeError, OverflowError, ValueError)


class _Codes(dict[Any, int]):
    """Numbers new keys as they come."""

    __slots__ = ()

    def __missing__(self, key: Hashable) -> int:
        self[key] = code = len(self)
        return code


class _KindCodes(dict[Any, int]):
    __slots__ = ()

    def __missing__(self, key: Hashable) -> int:
        return int(Kind.OTHER)


class Builder:
    """Columns under way. Events go in by :meth:`add`, the trace comes out of :meth:`finish`.

    Args:
        source: The file's name, for messages.
        limits: Bounds on events and names.
        python: Whether to keep ``python_function`` events.
        health: Counters to add to.
    """

    def __init__(self, source: str, limits: Limits, python: bool, health: dict[str, int]) -> None:
        self.rows = 0
        self.left_out = 0
        # Whether times come as `Ns` where they had a fraction.
        self.exact = False
        # Whether the last event that came by was a Python frame.
        self._after_python = False
        self._source = source
        self._limits = limits
        self._python = python
        self._health = health
        self._kinds = _KindCodes({name: int(kind) for name, kind in _KINDS.items()})
        self._names = _Codes()
        self._looked_at = 0
        self._convolutions: set[int] = set()
        self._threads = _Codes()
        self._signatures = _Codes({b"": 0})
        self._name = bytearray()
        self._kind = bytearray()
        self._thread = bytearray()
        self._ts = Times()
        self._dur = Times()
        self._sequence = bytearray()
        self._correlation = bytearray()
        self._stream = bytearray()
        self._dims = bytearray()

    def add(self, events: Sequence[Event]) -> None:
        """Take in decoded events, of which only those with an interval are kept.

        Raises:
            InputError: More events (``E313``) or distinct texts (``E314``) than allowed.
        """
        total = len(events)
        events = [event for event in events if event.ph == "X"]
        try:
            kinds = bytes([self._kinds[event.cat] for event in events])
        except TypeError:
            events = [self._tame(event) for event in events]
            kinds = bytes([self._kinds[event.cat] for event in events])
        if kinds:
            self._after_python = kinds[-1] == Kind.PYTHON
        if not self._python and Kind.PYTHON in kinds:
            events = [
                event for event, kind in zip(events, kinds, strict=True) if kind != Kind.PYTHON
            ]
            kinds = kinds.replace(bytes([Kind.PYTHON]), b"")
        self.left_out += total - len(events)
        if not events:
            return
        try:
            packed = self._pack(events)
        except _MISFIT:
            packed = self._pack([self._tame(event) for event in events])
        name, thread, ts, dur, sequence, correlation, stream, dims = packed
        self._kind += kinds
        self._name += name
        self._thread += thread
        self._ts.add(ts)
        self._dur.add(dur)
        self._sequence += sequence
        self._correlation += correlation
        self._stream += stream
        self._dims += dims
        self.rows += len(events)
        self._check()

    def pass_over(self, frames: int) -> None:
        """Note Python frames that were not decoded."""
        self.left_out += frames
        self._after_python = True

    def _pack(self, events: Sequence[Event]) -> tuple[Any, ...]:
        """The columns of these events; nothing is kept of them unless all fit."""
        number = len(events)
        times = struct.Struct(f"<{number}d").pack
        longs = struct.Struct(f"<{number}q").pack
        ints = struct.Struct(f"<{number}i").pack
        args: list[Args] = [event.args for event in events]  # type: ignore[misc]
        starts = [event.ts for event in events]
        durations = [event.dur for event in events]
        if self.exact:
            ts: bytes | list[Any] = [nanoseconds(value) for value in starts]
            dur: bytes | list[Any] = [nanoseconds(value) for value in durations]
        else:
            ts, dur = times(*starts), times(*durations)
        sequence = longs(*[a.sequence for a in args])
        correlation = longs(*[a.correlation for a in args])
        stream = ints(*[a.stream for a in args])
        names = self._names
        codes = [names[event.name] for event in events]
        name = ints(*codes)
        pairs = zip([event.pid for event in events], [event.tid for event in events], strict=True)
        thread = ints(*map(self._threads.__getitem__, pairs))
        shapes: Iterable[tuple[Any, ...]] = zip(
            [a.input_dims for a in args],
            [a.old_input_dims for a in args],
            [a.input_type for a in args],
            strict=True,
        )
        convolutions = self._find_convolutions()
        if not convolutions.isdisjoint(codes):
            pairs_of = zip(shapes, args, codes, strict=True)
            shapes = [(*s, a.values) if c in convolutions else s for s, a, c in pairs_of]
        dims = ints(*map(self._signatures.__getitem__, map(b"".join, shapes)))
        return name, thread, ts, dur, sequence, correlation, stream, dims

    def _find_convolutions(self) -> set[int]:
        """Codes of the names, so far, of what cannot be sized up by its shapes alone."""
        new = itertools.islice(self._names, self._looked_at, None)
        found = [
            code for code, name in enumerate(new, self._looked_at) if _CONVOLUTION in str(name)
        ]
        self._looked_at = len(self._names)
        self._convolutions.update(found)
        return self._convolutions

    def _tame(self, event: Event) -> Event:
        """The event with values that fit its columns; what makes no sense becomes unknown."""
        args = event.args or NO_ARGS
        return Event(
            ph="X",
            cat=event.cat if isinstance(event.cat, str) else "",
            name=str(event.name),
            pid=_thread_part(event.pid),
            tid=_thread_part(event.tid),
            ts=_time(event.ts),
            dur=_time(event.dur),
            args=Args(
                correlation=self._integer(args.correlation, 2**62),
                stream=self._integer(args.stream, 2**31),
                input_type=args.input_type,
                input_dims=args.input_dims,
                old_input_dims=args.old_input_dims,
                sequence=self._integer(args.sequence, 2**62),
                values=args.values,
            ),
        )

    def _integer(self, value: Any, end: int) -> int:
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 18:
            value = int(value)
        if not isinstance(value, int):
            return -1
        if -(2**31) <= value < end:
            return int(value)
        count(self._health, "numbers_out_of_range")
        return -1

    def _check(self) -> None:
        limits = self._limits
        if self.rows > limits.events:
            raise refuse_events(self._source, limits.events)
        if len(self._names) > limits.distinct:
            raise refuse_distinct(self._source, limits.distinct, "names")
        if len(self._signatures) > limits.distinct:
            raise refuse_distinct(self._source, limits.distinct, "input shapes")
        if len(self._threads) > limits.distinct:
            raise refuse_distinct(self._source, limits.distinct, "threads")

    def finish(self, metadata: dict[str, Any], rank: int | None, cut: bool) -> Trace:
        """The trace of all events taken in; the builder is spent.

        Args:
            metadata: What the file says about itself.
            rank: Its rank.
            cut: Whether the file was cut among its events.
        """
        name = np.frombuffer(self._name, np.int32)
        kind = np.frombuffer(self._kind, np.int8)
        names = _texts(self._names, self._limits.name_chars, self._health)
        annotations = np.array([text.startswith(_ANNOTATION_PREFIXES) for text in names], np.bool_)
        if len(names):
            kind[(kind == Kind.OP) & annotations[name]] = Kind.ANNOTATION
        thread, threads = _merge_threads(np.frombuffer(self._thread, np.int32), self._threads)
        ts, dur = self._ts.finish(), self._dur.finish()
        if unknown := int((dur == NO_TIME).sum()):
            count(self._health, "events_without_duration", unknown)
            dur[dur == NO_TIME] = 0
        if negative := int((dur < 0).sum()):
            count(self._health, "negative_durations", negative)
            dur[dur < 0] = 0
        trace = Trace(
            name=name,
            kind=kind,
            thread=thread,
            ts=ts,
            dur=dur,
            sequence=self._numbers(self._sequence),
            correlation=self._numbers(self._correlation),
            stream=np.frombuffer(self._stream, np.int32),
            dims=np.frombuffer(self._dims, np.int32),
            names=names,
            threads=threads,
            signatures=tuple(key.decode(errors="replace") for key in self._signatures),
            rank=rank,
            metadata=metadata,
            health=self._health,
            left_out=self.left_out,
        )
        if cut and not self._after_python and kind[-1] in _HOST:
            trace = replace(trace, cut_at=int(ts[-1]))
        missing = ts == NO_TIME
        if not missing.any():
            return trace
        count(self._health, "events_without_time", int(missing.sum()))
        return _rows(trace, ~missing)

    def _numbers(self, packed: bytearray) -> np.ndarray[Any, np.dtype[np.int64]]:
        numbers = np.frombuffer(packed, np.int64)
        odd = (numbers < -(2**31)) | (numbers >= 2**62)
        if odd.any():
            count(self._health, "numbers_out_of_range", int(odd.sum()))
            numbers[odd] = -1
        return numbers


def _thread_part(value: Any) -> Any:
    return value if isinstance(value, (int, str)) else str(value)


def _time(value: Any) -> Any:
    if isinstance(value, int) and abs(value) < 2**62:
        return value
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def _texts(codes: Iterable[Any], most: int, health: dict[str, int]) -> tuple[str, ...]:
    texts = tuple(str(key) for key in codes)
    if long := sum(len(text) > most for text in texts):
        count(health, "names_shortened", long)
        texts = tuple(text[:most] for text in texts)
    return texts


def _merge_threads(
    codes: np.ndarray[Any, np.dtype[np.int32]], pairs: Iterable[tuple[Any, Any]]
) -> tuple[np.ndarray[Any, np.dtype[np.int32]], tuple[tuple[str, str], ...]]:
    """Threads as text; a thread written as a number here and as text there is one thread."""
    merged: _Codes = _Codes()
    renumbered = [merged[str(pid), str(tid)] for pid, tid in pairs]
    if len(merged) < len(renumbered):
        codes = np.array(renumbered, np.int32)[codes]
    return codes, tuple(merged)


def _rows(trace: Trace, kept: np.ndarray[Any, np.dtype[np.bool_]]) -> Trace:
    columns = {
        name: getattr(trace, name)[kept]
        for name in (
            "name", "kind", "thread", "ts", "dur", "sequence", "correlation", "stream", "dims",
        )
    }  # fmt: skip
    return replace(trace, **columns)
