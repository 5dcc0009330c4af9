"""Packed columns to a trace, a piece at a time, in as few bytes as their values allow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from recompute_scan.trace.columns import Bool, Int8, Int32, Int64, Ints, Trace
from recompute_scan.trace.health import count
from recompute_scan.trace.kineto.packing import Codes, Packed, Packer
from recompute_scan.trace.kineto.schema import LATEST_US, NO_TIME, Event, Kind
from recompute_scan.trace.limits import Limits, refuse_distinct, refuse_events

# Rows whose times wait as doubles before they become nanoseconds together.
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
    """Columns under way. Events go in by :meth:`add`, the trace comes out of :meth:`finish`.

    Args:
        source: The file's name, for messages.
        limits: Bounds on events and names.
        packer: Numbers names, threads and shapes.
        health: Counters to add to.
    """

    def __init__(self, source: str, limits: Limits, packer: Packer, health: dict[str, int]) -> None:
        self.rows = 0
        self.packer = packer
        self._source = source
        self._limits = limits
        self._health = health
        self._kind = bytearray()
        self._name = bytearray()
        self._thread = bytearray()
        self._dims = bytearray()
        self._ts, self._dur = Times(), Times()
        self._sequence, self._correlation, self._stream = Numbers(), Numbers(), Numbers()

    def add(self, events: Sequence[Event]) -> None:
        """Take in decoded events, of which only those with an interval are kept.

        Raises:
            InputError: More events (``E313``) or distinct texts (``E314``) than allowed.
        """
        packed = self.packer.pack(events)
        if packed is not None:
            self.take(packed)

    def take(self, packed: Packed) -> None:
        """Take in events that are packed already, with the codes of this builder's packer.

        Raises:
            InputError: See :meth:`add`.
        """
        self._kind += packed.kind
        self._name += packed.name
        self._thread += packed.thread
        self._dims += packed.dims
        self._ts.add(packed.ts, packed.exact)
        self._dur.add(packed.dur, packed.exact)
        self._sequence.add(packed.sequence, packed.rows)
        self._correlation.add(packed.correlation, packed.rows)
        self._stream.add(packed.stream, packed.rows)
        self.rows += packed.rows
        self._check()

    def _check(self) -> None:
        most = min(self._limits.events, _MOST_ROWS)
        if self.rows > most:
            raise refuse_events(self._source, most)
        packer = self.packer
        for codes, what in (
            (packer.names, "names"),
            (packer.signatures, "input shapes"),
            (packer.threads, "threads"),
        ):
            if len(codes) > self._limits.distinct:
                raise refuse_distinct(self._source, self._limits.distinct, what)

    def finish(self, metadata: dict[str, Any], rank: int | None, cut: bool) -> Trace:
        """The trace of all events taken in; the builder is spent.

        Args:
            metadata: What the file says about itself.
            rank: Its rank.
            cut: Whether the file was cut among its events.
        """
        packer, health = self.packer, self._health
        name: Int32 = np.frombuffer(self._name, np.int32)
        kind: Int8 = np.frombuffer(self._kind, np.int8)
        names = _texts(packer.names, self._limits.name_chars, health)
        annotations = np.array([text.startswith(_ANNOTATION_PREFIXES) for text in names], np.bool_)
        if len(names):
            kind[(kind == Kind.OP) & annotations[name]] = Kind.ANNOTATION
        thread, threads = _merge_threads(np.frombuffer(self._thread, np.int32), packer.threads)
        self._count_missing(name, thread, kind, threads)
        ts, dur = self._ts.finish(), self._dur.finish()
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
            sequence=_in_range(self._sequence, health, lowest=-1),
            correlation=_in_range(self._correlation, health),
            stream=_in_range(self._stream, health),
            dims=np.frombuffer(self._dims, np.int32),
            names=names,
            threads=threads,
            signatures=tuple(key.decode(errors="replace") for key in packer.signatures),
            rank=rank,
            metadata=metadata,
            health=health,
            left_out=packer.left_out,
        )
        if cut and not packer.after_python and kind[-1] in _HOST:
            trace = replace(trace, cut_at=int(ts[-1]))
        missing = ts == NO_TIME
        if not missing.any():
            return trace
        count(health, "events_without_time", int(missing.sum()))
        return _rows(trace, ~missing)

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


def _rows(trace: Trace, kept: Bool) -> Trace:
    columns = {
        name: getattr(trace, name)[kept]
        for name in (
            "name", "kind", "thread", "ts", "dur", "sequence", "correlation", "stream", "dims",
        )
    }  # fmt: skip
    return replace(trace, **columns)
