"""Perfetto's protobuf traces of torch's profiler, read as a stream.

``export_chrome_trace("x.pftrace")`` writes them from torch 2.14 on, with the CUPTI monitor
(``torch/csrc/profiler/cupti/monitor_pftrace.cpp``): the host's events as slices with Kineto's
arguments beside them, what the GPU did as slices too, or as render stages. What the JSON says of
itself (rank, devices) is not in them, nor are the events' categories.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recompute_scan.collecting import paused
from recompute_scan.errors import InputError
from recompute_scan.trace.columns import Bool, Int32, Int64, Ints, Kind, Trace
from recompute_scan.trace.health import count
from recompute_scan.trace.limits import Limits, refuse_events
from recompute_scan.trace.perfetto.interned import InternedNames, Tracks
from recompute_scan.trace.perfetto.kinds import Stages
from recompute_scan.trace.perfetto.messages import PackedRun, gather_nested
from recompute_scan.trace.perfetto.packets import Packets
from recompute_scan.trace.perfetto.shapes import Shapes
from recompute_scan.trace.perfetto.slices import OPEN, Slices, pair
from recompute_scan.trace.perfetto.wire import Bytes
from recompute_scan.trace.streams import Stream

# Field numbers in TracePacket.
_TIME, _SEQUENCE, _TRACK_EVENT, _INTERNED, _STAGE, _DESCRIPTOR = 8, 10, 11, 12, 53, 60
# Times beyond it are none; the difference of two fits into 63 bits.
_LATEST = 2**62
_LARGEST_NUMBER = 2**62


def read_perfetto(
    stream: Stream,
    source: str,
    *,
    python: bool,
    within: tuple[int, int] | None,
    limits: Limits,
    health: dict[str, int],
) -> Trace:
    """The trace in a stream of packets.

    Args:
        stream: The bytes, uncompressed.
        source: Their name, for messages.
        python: Whether Python frames are kept.
        within: Only what overlaps this span of time is kept, ns on the trace's clock.
        limits: What is refused.
        health: Counters to add to.

    Raises:
        InputError: None of its events is one of torch's profiler (``E330``), or it is beyond a
            limit (``E311``, ``E313`` to ``E315``).
    """
    with paused():
        reader = _PacketReader(source, limits, health)
        for data, start, end in Packets(stream, source, limits, health).runs():
            reader.take(data, start, end)
        return reader.finish(python, within)


class _PacketReader:
    def __init__(self, source: str, limits: Limits, health: dict[str, int]) -> None:
        self._source = source
        self._limits = limits
        self._health = health
        self._names = InternedNames(source, limits)
        self._tracks = Tracks(source, limits)
        self._shapes = Shapes(source, limits)
        self._slices = Slices(self._names, self._shapes)
        self._stages = Stages(self._names)
        self._broken = [0]
        self._packets = 0
        self._events = 0
        self._left_out = 0

    def take(self, data: Bytes, start: Int64, end: Int64) -> None:
        """Take in the packets of one run."""
        number = len(start)
        fields, events = gather_nested(data, start, end, self._broken, _TRACK_EVENT)
        time = fields.numbers(_TIME, number, OPEN)
        sequence = fields.numbers(_SEQUENCE, number)
        names, tracks = fields.pick(_INTERNED), fields.pick(_DESCRIPTOR)
        stages = fields.pick(_STAGE).last(number)
        self._events += events.messages + len(stages.message)
        if self._events > 2 * self._limits.events:  # each begins and ends
            raise refuse_events(self._source, self._limits.events)
        if len(names.message):
            self._names.define(data, names, sequence, self._packets, self._broken)
        if len(tracks.message):
            self._tracks.describe(data, tracks, self._broken)
        run = PackedRun(data, sequence, time, self._packets, self._broken)
        if events.messages:
            self._left_out += self._slices.take(run, events)
        if len(stages.message):
            self._stages.take(run, stages)
        self._packets += number

    def finish(self, python: bool, within: tuple[int, int] | None) -> Trace:
        """The trace of all that was taken in."""
        count(self._health, "events_dropped", self._broken[0])
        count(self._health, "text_repaired", self._names.undecodable)
        self._slices.numbering.report(self._health)
        rows = _Rows(self._host(), self._device())
        if not len(rows.kind) or not (rows.kind != Kind.OTHER).any():
            raise InputError(
                "E330",
                f"{self._source} is a Perfetto trace, but none of torch.profiler.",
                why=(
                    "none of its events has what the profiler writes beside one"
                    if self._events
                    else "it holds no events of a program"
                ),
                hint='give the file of prof.export_chrome_trace("trace.json") or "trace.pftrace"',
            )
        if len(rows.kind) > self._limits.events:
            raise refuse_events(self._source, self._limits.events)
        base = int(rows.time.min())
        kept = self._kept(rows, base, python, within)
        frames = int((rows.kind == Kind.PYTHON).sum())
        self._left_out += int((~kept).sum())
        return self._trace(rows, kept, base, frames)

    def _host(self) -> tuple[Any, ...]:
        edges = _joined(self._slices.edges, 3)
        columns = _joined(self._slices.columns, 7)
        track, time, begins = edges
        begins = begins.astype(np.bool_)
        usable = (time > 0) & (time < _LATEST)
        if not usable.all():
            count(self._health, "events_without_time", int((~usable & begins).sum()))
            columns = tuple(each[usable[begins]] for each in columns)
            track, time, begins = track[usable], time[usable], begins[usable]
        ends = pair(track, time, begins)
        start = time[begins]
        lasting = ends != OPEN
        kind, *rest = columns
        count(
            self._health,
            "events_without_duration",
            int((~lasting & (kind != Kind.OTHER)).sum()),
        )
        return (start, np.where(lasting, ends - start, 0), track[begins], kind, *rest)

    def _device(self) -> tuple[Any, ...]:
        time, duration, *rest = _joined(self._stages.columns, 7)
        usable = (time > 0) & (time < _LATEST)
        count(self._health, "events_without_time", int((~usable).sum()))
        odd = (duration < 0) | (duration > _LATEST)
        count(self._health, "negative_durations", int((odd & usable).sum()))
        columns = (time, np.where(odd, 0, duration), *rest)
        return tuple(each[usable] for each in columns)

    def _kept(self, rows: _Rows, base: int, python: bool, within: tuple[int, int] | None) -> Bool:
        kept: Bool = np.full(len(rows.kind), True)
        if not python:
            kept &= rows.kind != Kind.PYTHON
        if within is not None:
            start = rows.time - base
            kept &= (start < within[1]) & (start + rows.duration > within[0])
        return kept

    def _trace(self, rows: _Rows, kept: Bool, base: int, frames: int) -> Trace:
        thread, threads = self._threads(rows, kept)
        metadata: dict[str, Any] = {"baseTimeNanoseconds": base}
        if frames:
            metadata["with_stack"] = 1
        texts = tuple(self._names.texts)
        most = self._limits.name_chars
        count(self._health, "names_shortened", sum(len(text) > most for text in texts))
        self._note_missing(rows, kept)
        return Trace(
            name=rows.name[kept],
            kind=rows.kind[kept],
            thread=thread,
            ts=rows.time[kept] - base,
            dur=rows.duration[kept],
            sequence=self._numbers(rows.sequence[kept]),
            correlation=self._numbers(rows.correlation[kept]),
            stream=_narrow(rows.stream[kept]),
            bytes=self._numbers(rows.moved[kept]),
            dims=rows.dims[kept],
            names=tuple(text[:most] for text in texts),
            threads=threads,
            signatures=tuple(text.decode(errors="replace") for text in self._shapes.signatures),
            metadata=metadata,
            health=self._health,
            left_out=self._left_out,
        )

    def _threads(self, rows: _Rows, kept: Bool) -> tuple[Int32, tuple[tuple[str, str], ...]]:
        """Code of each event's thread or stream, and what they are called."""
        codes = np.zeros(len(rows.kind), np.int32)
        merged: dict[tuple[str, str], int] = {}
        for on_device in (False, True):
            mine = kept & (rows.on_device == on_device)
            places, which = np.unique(rows.place[mine], return_inverse=True)
            called = [
                (str(place >> 32), _stream(place)) if on_device else self._tracks.called(place)
                for place in places.tolist()
            ]
            numbers = [merged.setdefault(each, len(merged)) for each in called]
            codes[mine] = np.array(numbers, np.int32)[which]
        return codes[kept], tuple(merged)

    def _note_missing(self, rows: _Rows, kept: Bool) -> None:
        unnamed = kept & (rows.name == 0) & (rows.kind <= Kind.RUNTIME)
        count(self._health, "events_without_name", int(unnamed.sum()))

    def _numbers(self, numbers: Int64) -> Ints:
        odd = (numbers < -1) | (numbers >= _LARGEST_NUMBER)
        count(self._health, "numbers_out_of_range", int(odd.sum()))
        return _narrow(np.where(odd, -1, numbers))


class _Rows:
    """The host's events and the device's, one below the other."""

    def __init__(self, host: tuple[Any, ...], device: tuple[Any, ...]) -> None:
        time, duration, track, kind, name, sequence, correlation, stream, moved, dims = host
        d_time, d_duration, d_kind, d_name, d_correlation, d_stream, gpu = device
        number = len(d_time)

        def both(first: Any, second: Any, dtype: Any = np.int64) -> Any:
            return np.concatenate([first, second]).astype(dtype, copy=False)

        self.time: Int64 = both(time, d_time)
        self.duration: Int64 = both(duration, d_duration)
        self.kind = both(kind, d_kind, np.int8)
        self.name: Int32 = both(name, d_name, np.int32)
        self.sequence: Int64 = both(sequence, np.full(number, -1))
        self.correlation: Int64 = both(correlation, d_correlation)
        self.stream: Int32 = both(stream, d_stream, np.int32)
        self.moved: Int64 = both(moved, np.full(number, -1))
        self.dims: Int32 = both(dims, np.zeros(number), np.int32)
        where: Int64 = both(track, (gpu << 32) | (d_stream.astype(np.int64) & 0xFFFFFFFF))
        self.place = where
        self.on_device = both(np.zeros(len(time)), np.ones(number), np.bool_)


def _stream(place: int) -> str:
    number = place & 0xFFFFFFFF
    return str(number) if number < 2**31 else "unknown"


def _joined(parts: list[Any], width: int) -> tuple[Any, ...]:
    if not parts:
        return tuple(np.zeros(0, np.int64) for _ in range(width))
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def _narrow(numbers: Any) -> Ints:
    """In 32 bits where all of them fit."""
    if len(numbers) and numbers.max() < 2**31:
        narrow: Ints = numbers.astype(np.int32)
        return narrow
    kept: Ints = numbers
    return kept
