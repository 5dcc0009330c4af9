"""Tables of Nsight Systems' export to columns of events.

Tables and columns are those of the "SQLite Export Schema Reference" in NVIDIA's Nsight Systems
documentation (``nsys-exporter/exported_data.html``). Tables are made lazily there and columns
differ between versions, so a column that is missing is unknown for every event, and a table that
is missing has no events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
from msgspec import Struct, structs

from recompute_scan.trace.columns import Bool, Int64, Kind
from recompute_scan.trace.limits import Limits, refuse_distinct, refuse_events
from recompute_scan.trace.nsys.database import UNKNOWN, UNREADABLE, Database
from recompute_scan.trace.nsys.texts import NAMELESS, Said, Texts, Wanted, look_up

STRINGS = "StringIds"
_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
_SETS = "CUPTI_ACTIVITY_KIND_MEMSET"
_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
_RANGES = "NVTX_EVENTS"
EVENT_TABLES = (_KERNELS, _COPIES, _SETS, _GRAPHS, _CALLS, _RANGES)
# Push/pop ranges of the program, and those of imported NVTXT files (ENUM_NSYS_EVENT_TYPE). Those
# of start and end calls may cross threads and do not nest.
_PUSH_POP = (59, 70)
# What the schema reference calls CUDA_MEMCPY_KIND, in Kineto's words.
_COPIED = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
# Starts and ends beyond it are no times; the difference of two fits into 63 bits.
_LATEST = 2**62
_LARGEST_NUMBER = 2**62
_LOW_24 = (1 << 24) - 1
_T = TypeVar("_T")


class EventRows(Struct, frozen=True):
    """Events of one or more tables, one entry each.

    Attributes:
        start: ns on the recording's clock.
        end: ns, not before ``start``.
        process: Process number, ``UNKNOWN`` where not told.
        place: ``globalTid``, or device and stream together.
        on_device: Which of the two ``place`` is.
        correlation: -1 where there is none.
        stream: -1 on the host.
        said: Four columns: code of the name, kind, sequence number, code of the shapes.
    """

    start: Int64
    end: Int64
    process: Int64
    place: Int64
    on_device: Bool
    correlation: Int64
    stream: Int64
    said: Int64

    def __len__(self) -> int:
        return len(self.start)

    def rows(self, kept: Bool) -> EventRows:
        """Some of the events."""
        if kept.all():
            return self
        return EventRows(**{name: column[kept] for name, column in structs.asdict(self).items()})


class Export(Struct, frozen=True):
    """All that is used of one file.

    Attributes:
        events: Events of all tables.
        names: Distinct names, and shapes.
        devices: Names of the GPUs.
        left_out: Rows that are sound but no events: marks, domains, ranges that do not nest.
    """

    events: EventRows
    names: Texts
    devices: tuple[str, ...]
    left_out: int


def read_tables(database: Database, source: str, limits: Limits, health: dict[str, int]) -> Export:
    """The events of every table that is there.

    Args:
        database: The open file.
        source: Its name, for messages.
        limits: Bounds on events, distinct names and the length of names.
        health: Counters to add to.

    Raises:
        InputError: More events (``E313``) or distinct names (``E314``) than allowed.
    """
    reader = _TableReader(database, source, limits, health)
    parts = [
        reader.kernels(),
        reader.copies(),
        reader.activities(_SETS, Kind.COPY, "Memset"),
        reader.activities(_GRAPHS, Kind.KERNEL, "CUDA graph"),
        reader.calls(),
        reader.ranges(),
    ]
    reader.resolve()
    events = EventRows(
        **{
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in EventRows.__struct_fields__
        }
    )
    return Export(events, reader.names, reader.devices(), reader.left_out)


class _TableReader:
    def __init__(
        self, database: Database, source: str, limits: Limits, health: dict[str, int]
    ) -> None:
        self.names = Texts(limits.name_chars, health)
        self.left_out = 0
        self._database = database
        self._source = source
        self._limits = limits
        self._health = health
        self._number = 0
        self._asked: list[tuple[Wanted, Int64]] = []

    def kernels(self) -> EventRows:
        naming = ("demangledName", "shortName", "mangledName")
        columns, strings = self._device(_KERNELS, naming)
        name = strings[0]
        for other in strings[1:]:
            name = np.where(name == UNKNOWN, other, name)
        return self._events(columns, Kind.KERNEL, name, self.names.kernel, on_device=True)

    def copies(self) -> EventRows:
        columns, (kinds,) = self._device(_COPIES, ("copyKind",))
        said = np.tile(np.array(_nameless(Kind.COPY), np.int64), (len(columns["start"]), 1))
        distinct, which = np.unique(kinds, return_inverse=True)
        codes = [self.names.code(_copy_name(kind)) for kind in distinct.tolist()]
        said[:, 0] = np.array(codes, np.int64)[which]
        return self._events(columns, Kind.COPY, said=said, on_device=True)

    def activities(self, table: str, kind: int, name: str) -> EventRows:
        columns, _ = self._device(table, ())
        said = np.tile(np.array(_nameless(kind), np.int64), (len(columns["start"]), 1))
        if len(said):
            said[:, 0] = self.names.code(name)
        return self._events(columns, kind, said=said, on_device=True)

    def calls(self) -> EventRows:
        wanted = ("start", "end", "globalTid", "correlationId", "nameId")
        start, end, thread, correlation, name = self._columns(_CALLS, wanted)
        columns = {"start": start, "end": end, "correlation": correlation} | _on_host(thread)
        return self._events(columns, Kind.RUNTIME, name, self.names.call)

    def ranges(self) -> EventRows:
        wanted = ("start", "end", "globalTid", "eventType", "textId")
        typed = "eventType" in self._database.columns(_RANGES)
        blocks = [np.empty((0, len(wanted) + 4), np.int64)]
        for numbers, texts in self._sound(self._database.texts(_RANGES, wanted, "text")):
            self._count_rows(len(numbers))
            pushed = np.isin(numbers[:, 3], _PUSH_POP) if typed else np.full(len(numbers), True)
            closed = numbers[:, 1] != UNKNOWN
            self.left_out += int((~pushed).sum())
            self._add("ranges_without_end", int((pushed & ~closed).sum()))
            kept = np.flatnonzero(pushed & closed)
            said = [
                _nameless(Kind.ANNOTATION) if (text := texts[row]) is None else self._range(text)
                for row in kept.tolist()
            ]
            if said:
                blocks.append(np.hstack([numbers[kept], np.array(said, np.int64)]))
        rows = np.vstack(blocks)
        said_of = np.ascontiguousarray(rows[:, len(wanted) :])
        strings = np.where(said_of[:, 0] == NAMELESS, rows[:, 4], UNKNOWN)
        columns = {"start": rows[:, 0], "end": rows[:, 1]} | _on_host(rows[:, 2])
        return self._events(columns, Kind.ANNOTATION, strings, self._range, said=said_of)

    def resolve(self) -> None:
        """Give events their names, once all tables were read."""
        wanted = [one for one, _ in self._asked]
        look_up(wanted, self._sound(self._database.texts(STRINGS, ("id",), "value")))
        for one, said in self._asked:
            one.fill(said)
            missing = said[:, 0] == NAMELESS
            if missing.any():
                said[missing, 0] = self.names.code("")
                self._add("events_without_name", int(missing.sum()))
        self._check_names()

    def devices(self) -> tuple[str, ...]:
        blocks = self._sound(self._database.texts("TARGET_INFO_GPU", (), "name"))
        found = [text for _, texts in blocks for text in texts if text]
        return tuple(text.decode(errors="replace") for text in found)

    def _range(self, text: bytes) -> Said:
        said = self.names.range(text)
        self._check_names()
        return said

    def _device(self, table: str, further: tuple[str, ...]) -> tuple[dict[str, Int64], list[Int64]]:
        wanted = ("start", "end", "globalPid", "deviceId", "streamId", "correlationId", *further)
        start, end, pid, device, stream, correlation, *told = self._columns(table, wanted)
        device, stream = (_within(column, 0, 2**31) for column in (device, stream))
        columns = {"start": start, "end": end, "correlation": correlation, "stream": stream}
        columns |= {"place": (device << 32) + stream, "process": _process(pid)}
        return columns, told

    def _events(
        self,
        columns: dict[str, Int64],
        kind: int,
        strings: Int64 | None = None,
        reading: Callable[[bytes], Said] | None = None,
        *,
        said: Int64 | None = None,
        on_device: bool = False,
    ) -> EventRows:
        """Events with usable times; their names are looked up later where ``strings`` has any."""
        start, end = columns["start"], columns["end"]
        timed = (start > -_LATEST) & (start < _LATEST) & (end > -_LATEST) & (end < _LATEST)
        self._add("events_without_time", int((~timed).sum()))
        self._add("negative_durations", int((timed & (end < start)).sum()))
        none = np.full(len(start), -1, np.int64)
        if said is None:
            said = np.tile(np.array(_nameless(kind), np.int64), (len(start), 1))
        events = EventRows(
            start=start,
            end=np.maximum(start, end),
            process=columns["process"],
            place=columns["place"],
            on_device=np.full(len(start), on_device, np.bool_),
            correlation=_within(columns.get("correlation", none), 0, _LARGEST_NUMBER),
            stream=columns.get("stream", none),
            said=said,
        ).rows(timed)
        if strings is not None and reading is not None:
            self._asked.append((Wanted(strings[timed], UNKNOWN, reading), events.said))
        return events

    def _columns(self, table: str, wanted: tuple[str, ...]) -> list[Int64]:
        blocks: list[list[Int64]] = [[np.empty(0, np.int64)] for _ in wanted]
        for rows in self._sound(self._database.numbers(table, wanted)):
            self._count_rows(len(rows))
            for place, column in enumerate(blocks):
                column.append(rows[:, place].copy())
        return [np.concatenate(column) for column in blocks]

    def _sound(self, blocks: Iterator[_T]) -> Iterator[_T]:
        """The blocks before the place where a table is damaged."""
        try:
            yield from blocks
        except UNREADABLE:
            self._add("tables_damaged", 1)

    def _count_rows(self, number: int) -> None:
        self._number += number
        if self._number > self._limits.events:
            raise refuse_events(self._source, self._limits.events)

    def _check_names(self) -> None:
        if len(self.names) > self._limits.distinct:
            raise refuse_distinct(self._source, self._limits.distinct, "names")

    def _add(self, counter: str, number: int) -> None:
        if number:
            self._health[counter] = self._health.get(counter, 0) + number


def _copy_name(kind: int) -> str:
    """What Kineto calls such a copy."""
    return f"Memcpy {_COPIED[kind]}" if kind in _COPIED else "Memcpy"


def _nameless(kind: int) -> Said:
    return NAMELESS, kind, -1, 0


def _on_host(thread: Int64) -> dict[str, Int64]:
    return {"place": thread, "process": _process(thread)}


def _process(number: Int64) -> Int64:
    return np.where(number == UNKNOWN, UNKNOWN, number >> 24 & _LOW_24)


def _within(numbers: Int64, least: int, end: int) -> Int64:
    """The numbers, -1 for those that make no sense."""
    return np.where((numbers >= least) & (numbers < end), numbers, -1)
