"""Reader of Nsight Systems' SQLite export (``nsys export --type sqlite``).

Tables and columns follow the "SQLite Export Schema Reference" in NVIDIA's Nsight Systems
documentation (``nsys-exporter/exported_data.html``). Tables are made lazily there and columns
differ between versions, so a column that is missing is unknown for every event, and a table that
is missing has no events. An export is recognized by the tables that every export has.

Kernels and the calls that launched them are always there, tied by ``correlationId``. Times are
whole nanoseconds. ``globalTid`` and ``globalPid`` hold the thread in 24 bits, the process in the
next 24, and machine numbers above (``nsys-exporter/examples.html``, "Serialized process and thread
identifiers").

Operators are there only where the script ran under ``torch.autograd.profiler.emit_nvtx``, which
``nsys profile --pytorch=autograd-nvtx`` and ``autograd-shapes-nvtx`` switch on. Each operator and
each autograd node becomes one range, with a text from ``torch/csrc/profiler/util.cpp``
(``getNvtxStr``)::

    name, seq = 12, op_id = 345, sizes = [[2, 8, 16], []], input_op_ids = [(344,0), (0,-1)]

Each part but the name may be missing: the sequence number where it is negative, ``op_id`` before
torch 1.10, sizes without ``record_shapes``. Before torch 1.5 nodes had ``stashed seq``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from msgspec import Struct, structs

from recompute_scan.errors import InputError
from recompute_scan.trace.columns import (
    DEFAULT_LIMITS,
    OPERATOR,
    RANGE,
    Bool,
    Int32,
    Int64,
    Kind,
    Limits,
    Trace,
    refuse,
)
from recompute_scan.trace.database import TEXT_CHARS, UNKNOWN, UNREADABLE, Database, open_database
from recompute_scan.trace.health import count

_OPERATORS = ("aten::", "autograd::engine::", "torch::autograd::", "prims::")
_SIZES = re.compile(r"\[[\[\], 0-9]*\]")
# Numbers of autograd have 64 bits; 18 digits fit into them.
_DIGITS = 18


class Range(NamedTuple):
    """The parts of the text of one range.

    Attributes:
        name: The name of the operator, node or annotation.
        kind: ``Kind.OP`` for operators and autograd nodes, else ``Kind.ANNOTATION``.
        sequence: Autograd's sequence number, -1 where there is none.
        sizes: Input shapes as JSON text, empty where they were not recorded.
    """

    name: str
    kind: int
    sequence: int
    sizes: str


def parse_range(text: str) -> Range:
    """The parts of an NVTX text; one that ``emit_nvtx`` did not write is all name."""
    rest = text.partition(", input_op_ids = ")[0]
    rest, _, sizes = rest.partition(", sizes = ")
    if sizes and not _SIZES.fullmatch(sizes):
        sizes = ""
    rest, operator_number = _number(rest, ", op_id = ")
    rest, sequence = _number(rest, ", seq = ")
    if sequence < 0:
        rest, sequence = _number(rest, ", stashed seq = ")
    return Range(rest, _kind(rest, sequence, operator_number), sequence, sizes)


def _number(text: str, label: str) -> tuple[str, int]:
    """The text without its numbered end, and the number; the text itself and -1 without one."""
    before, found, digits = text.rpartition(label)
    if found and digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS:
        return before, int(digits)
    return text, -1


def _kind(name: str, sequence: int, operator_number: int) -> int:
    if RANGE.match(name):
        return Kind.ANNOTATION
    if sequence >= 0 or name.startswith(_OPERATORS):
        return Kind.OP
    if operator_number >= 0 and OPERATOR.match(name):  # torch numbered it
        return Kind.OP
    return Kind.ANNOTATION


# A text as numbers: code of the name, kind, sequence number, code of the shapes.
Said = tuple[int, int, int, int]
NAMELESS = -1
# The driver's version of an entry point: cudaLaunchKernel_v7000. Kineto leaves it out.
_VERSION = re.compile(r"_v\d+(_ptsz|_ptds)?$")


class Texts:
    """Distinct names and shapes, numbered as they come.

    A name is decoded once per distinct text, not once per event, except for NVTX ranges, which
    mostly have different texts. One longer than ``most_chars`` is cut and counted.
    """

    def __init__(self, most_chars: int, health: dict[str, int]) -> None:
        self._codes: dict[str, int] = {}
        self._sizes: dict[str, int] = {"": 0}
        self._most_chars = most_chars
        self._health = health

    @property
    def names(self) -> tuple[str, ...]:
        """All names, by code."""
        return tuple(self._codes)

    @property
    def signatures(self) -> tuple[str, ...]:
        """All shapes, by code; the first is empty."""
        return tuple(self._sizes)

    def __len__(self) -> int:
        return max(len(self._codes), len(self._sizes))

    def code(self, name: str) -> int:
        """Code of a name."""
        if len(name) > self._most_chars:
            name = name[: self._most_chars]
            if name not in self._codes:
                count(self._health, "names_shortened")
        return self._codes.setdefault(name, len(self._codes))

    def kernel(self, text: bytes) -> Said:
        """The name of a device activity."""
        return self.code(self._decode(text)), Kind.KERNEL, -1, 0

    def call(self, text: bytes) -> Said:
        """The name of a CUDA call, without the version of its entry point."""
        return self.code(_VERSION.sub("", self._decode(text))), Kind.RUNTIME, -1, 0

    def range(self, text: bytes) -> Said:
        """All parts of an NVTX range's text."""
        decoded = self._decode(text)
        name, kind, sequence, sizes = parse_range(decoded)
        # Shapes that were cut are no shapes.
        sizes = sizes if len(decoded) < TEXT_CHARS else ""
        return self.code(name), kind, sequence, self._sizes.setdefault(sizes, len(self._sizes))

    def _decode(self, text: bytes) -> str:
        try:
            return text.decode()
        except UnicodeDecodeError:
            count(self._health, "text_repaired")
            return text.decode(errors="replace")


class Wanted:
    """The rows of ``StringIds`` that one table's events refer to.

    Args:
        strings: Row for each event, ``none`` where its name is known or lacking.
        none: See ``strings``.
        reading: Reads a text of this table.
    """

    def __init__(self, strings: Int64, none: int, reading: Callable[[bytes], Said]) -> None:
        self._asks = strings != none
        self._rows, self._where = np.unique(strings[self._asks], return_inverse=True)
        self._said = np.full((len(self._rows), 4), NAMELESS, np.int64)
        self._reading = reading

    def offer(self, rows: Int64, texts: Sequence[bytes | None]) -> None:
        """Read the wanted texts among some rows of ``StringIds``."""
        if not len(self._rows):
            return
        at = np.minimum(self._rows.searchsorted(rows), len(self._rows) - 1)
        for row in np.flatnonzero(self._rows[at] == rows).tolist():
            if (text := texts[row]) is not None:
                self._said[at[row]] = self._reading(text)

    def fill(self, said: Int64) -> None:
        """Write the texts' numbers over the events' rows, where a text was found."""
        found = self._said[self._where]
        known = found[:, 0] != NAMELESS
        said[np.flatnonzero(self._asks)[known]] = found[known]


STRINGS = "StringIds"
_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
_SETS = "CUPTI_ACTIVITY_KIND_MEMSET"
_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
_RANGES = "NVTX_EVENTS"
EVENT_TABLES = (_KERNELS, _COPIES, _SETS, _GRAPHS, _CALLS, _RANGES)
# Push/pop ranges of the program and of imported NVTXT files (ENUM_NSYS_EVENT_TYPE). Ranges of start
# and end calls may cross threads and do not nest.
_PUSH_POP = (59, 70)
# The schema reference's CUDA_MEMCPY_KIND in Kineto's words.
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
        process: Process number, or ``UNKNOWN``.
        place: ``globalTid``, or device and stream together.
        on_device: Which of the two ``place`` is.
        correlation: -1 where there is none.
        stream: -1 on the host.
        texts: Four columns, see ``Said``.
    """

    start: Int64
    end: Int64
    process: Int64
    place: Int64
    on_device: Bool
    correlation: Int64
    stream: Int64
    texts: Int64

    def __len__(self) -> int:
        return len(self.start)

    def rows(self, kept: Bool) -> EventRows:
        """Some of the events."""
        if kept.all():
            return self
        return EventRows(**{name: column[kept] for name, column in structs.asdict(self).items()})


class TableReader:
    """Reads the tables of one file.

    Attributes:
        names: Distinct names, and shapes.
        left_out: Rows that are sound but no events: marks, domains, ranges that do not nest.
    """

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

    def read(self) -> EventRows:
        """The events of every table that is there.

        Raises:
            InputError: More events (``E313``) or distinct names (``E314``) than allowed.
        """
        parts = [
            self._device(_KERNELS, Kind.KERNEL, reading=self.names.kernel),
            self._device(_COPIES, Kind.COPY, _copy_name),
            self._device(_SETS, Kind.COPY, lambda _: "Memset"),
            self._device(_GRAPHS, Kind.KERNEL, lambda _: "CUDA graph"),
            self._calls(),
            self._ranges(),
        ]
        self._resolve()
        names = EventRows.__struct_fields__
        return EventRows(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        )

    def _device(
        self,
        table: str,
        kind: int,
        named: Callable[[int], str] | None = None,
        reading: Callable[[bytes], Said] | None = None,
    ) -> EventRows:
        """Device activities, named by their kind of copy or by the texts that they refer to."""
        wanted = ("start", "end", "globalPid", "deviceId", "streamId", "correlationId")
        texts = ("demangledName", "shortName", "mangledName") if reading else ("copyKind",)
        start, end, pid, device, stream, correlation, *others = self._columns(
            table, (*wanted, *texts)
        )
        device, stream = (_within(column, 0, 2**31) for column in (device, stream))
        columns = {"start": start, "end": end, "correlation": correlation, "stream": stream}
        columns |= {"place": (device << 32) + stream, "process": _process(pid)}
        said = _nameless(kind, len(start))
        name = others[0]
        for other in others[1:]:
            name = np.where(name == UNKNOWN, other, name)
        if named is not None:
            distinct, which = np.unique(name, return_inverse=True)
            codes = [self.names.code(named(number)) for number in distinct.tolist()]
            said[:, 0] = np.array(codes, np.int64)[which]
        return self._events(columns, said, name, reading, on_device=True)

    def _calls(self) -> EventRows:
        wanted = ("start", "end", "globalTid", "correlationId", "nameId")
        start, end, thread, correlation, name = self._columns(_CALLS, wanted)
        columns = {"start": start, "end": end, "correlation": correlation} | _on_host(thread)
        said = _nameless(Kind.RUNTIME, len(start))
        return self._events(columns, said, name, self.names.call)

    def _ranges(self) -> EventRows:
        wanted = ("start", "end", "globalTid", "eventType", "textId")
        typed = "eventType" in self._database.columns(_RANGES)
        blocks = [np.empty((0, len(wanted) + 4), np.int64)]
        for numbers, texts in self._sound(self._database.texts(_RANGES, wanted, "text")):
            self._count_rows(len(numbers))
            pushed = np.isin(numbers[:, 3], _PUSH_POP) if typed else np.full(len(numbers), True)
            closed = numbers[:, 1] != UNKNOWN
            self.left_out += int((~pushed).sum())
            count(self._health, "ranges_without_end", int((pushed & ~closed).sum()))
            kept = np.flatnonzero(pushed & closed)
            said = [
                (NAMELESS, Kind.ANNOTATION, -1, 0)
                if (text := texts[row]) is None
                else self._range(text)
                for row in kept.tolist()
            ]
            if said:
                blocks.append(np.hstack([numbers[kept], np.array(said, np.int64)]))
        rows = np.vstack(blocks)
        said_of = np.ascontiguousarray(rows[:, len(wanted) :])
        strings = np.where(said_of[:, 0] == NAMELESS, rows[:, 4], UNKNOWN)
        columns = {"start": rows[:, 0], "end": rows[:, 1]} | _on_host(rows[:, 2])
        return self._events(columns, said_of, strings, self._range)

    def _resolve(self) -> None:
        """Give events their names, once all tables were read."""
        for numbers, texts in self._sound(self._database.texts(STRINGS, ("id",), "value")):
            for one, _ in self._asked:
                one.offer(numbers[:, 0], texts)
        for one, said in self._asked:
            one.fill(said)
            missing = said[:, 0] == NAMELESS
            if missing.any():
                said[missing, 0] = self.names.code("")
                count(self._health, "events_without_name", int(missing.sum()))
        self._check_names()

    def devices(self) -> list[str]:
        blocks = self._sound(self._database.texts("TARGET_INFO_GPU", (), "name"))
        found = [text for _, texts in blocks for text in texts if text]
        return [text.decode(errors="replace") for text in found]

    def _range(self, text: bytes) -> Said:
        said = self.names.range(text)
        self._check_names()
        return said

    def _events(
        self,
        columns: dict[str, Int64],
        said: Int64,
        strings: Int64,
        reading: Callable[[bytes], Said] | None,
        *,
        on_device: bool = False,
    ) -> EventRows:
        """Events with usable times; with ``reading`` names are looked up later in ``strings``."""
        start, end = columns["start"], columns["end"]
        timed = (start > -_LATEST) & (start < _LATEST) & (end > -_LATEST) & (end < _LATEST)
        count(self._health, "events_without_time", int((~timed).sum()))
        count(self._health, "negative_durations", int((timed & (end < start)).sum()))
        none = np.full(len(start), -1, np.int64)
        events = EventRows(
            start=start,
            end=np.maximum(start, end),
            process=columns["process"],
            place=columns["place"],
            on_device=np.full(len(start), on_device, np.bool_),
            correlation=_within(columns.get("correlation", none), 0, _LARGEST_NUMBER),
            stream=columns.get("stream", none),
            texts=said,
        ).rows(timed)
        if reading is not None:
            self._asked.append((Wanted(strings[timed], UNKNOWN, reading), events.texts))
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
            count(self._health, "tables_damaged")

    def _count_rows(self, number: int) -> None:
        self._number += number
        if self._number > self._limits.events:
            raise refuse("E313", self._source, self._limits.events)

    def _check_names(self) -> None:
        if len(self.names) > self._limits.distinct:
            raise refuse("E314", self._source, self._limits.distinct, "names")

    def check_threads(self, number: int) -> None:
        if number > self._limits.threads:
            raise refuse("E330", self._source, self._limits.threads)


def _copy_name(kind: int) -> str:
    """Kineto's name of such a copy."""
    return f"Memcpy {_COPIED[kind]}" if kind in _COPIED else "Memcpy"


def _nameless(kind: int, number: int) -> Int64:
    """So many events of a kind, as texts without a name."""
    return np.tile(np.array((NAMELESS, kind, -1, 0), np.int64), (number, 1))


def _on_host(thread: Int64) -> dict[str, Int64]:
    return {"place": thread, "process": _process(thread)}


def _process(number: Int64) -> Int64:
    return np.where(number == UNKNOWN, UNKNOWN, number >> 24 & _LOW_24)


def _within(numbers: Int64, least: int, end: int) -> Int64:
    """The numbers, -1 for those that make no sense."""
    return np.where((numbers >= least) & (numbers < end), numbers, -1)


# `nsys export` writes some of these for any recording; which ones depends on its version.
_OF_EVERY_EXPORT = (
    "META_DATA_EXPORT",
    "EXPORT_META_DATA",
    "TARGET_INFO_SESSION_START_TIME",
    "TARGET_INFO_SYSTEM_ENV",
    "ANALYSIS_DETAILS",
    "ProcessStreams",
)
# Other tables of a recording, in words.
_OTHERWISE = (
    ("OSRT_API", "calls into the operating system"),
    ("SCHED_EVENTS", "switches of threads"),
    ("COMPOSITE_EVENTS", "samples of the CPU"),
    ("MPI_P2P_EVENTS", "MPI"),
)
# Databases that people take for an export, by one of their tables.
_OTHERS = (
    ("read_only_op_instances", "it is DLProf's database; the export of nsys lies next to it"),
    ("rocpd_kernel_dispatch", "it is rocprofv3's database (rocpd)"),
    ("rocpd_op", "it is a database of AMD's RPD tracer"),
    ("CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL", "it is a database of nvprof"),
)
# nsys 2022 and before wrote the second one.
_VERSION_TABLES = ("META_DATA_EXPORT", "EXPORT_META_DATA")
_EXPORT_VERSION = re.compile(r"\d{4}(?:\.\d+){1,3}")
_RECORD = (
    "record with `nsys profile --trace=cuda,nvtx --pytorch=autograd-shapes-nvtx`, and export again"
)
_LOW_32 = (1 << 32) - 1


def load_nsys(path: Path, limits: Limits = DEFAULT_LIMITS) -> Trace:
    """The trace in an SQLite file that ``nsys export`` wrote.

    Of a recording of several processes, the one with the most operators is read (without any,
    the one with the most device work); events of the others are counted in ``health``.

    Args:
        path: The file. It is opened read-only, and nothing that its schema says is run.
        limits: Bounds on events, distinct names and the length of names.

    Raises:
        InputError: The file cannot be opened as a database (``E320``), it is a database but no
            export of Nsight Systems (``E321``), it holds no events of CUDA or NVTX (``E322``), or
            more events (``E313``), names (``E314``) or threads (``E330``) than ``limits`` allow.
    """
    health: dict[str, int] = {}
    try:
        with open_database(path) as database:
            _check_holds(database, path)
            reader = TableReader(database, str(path), limits, health)
            events, devices = reader.read(), reader.devices()
            version = _version_of(database)
    except (*UNREADABLE, OSError) as error:
        raise InputError(
            "E320",
            f"{path} cannot be read as an SQLite database.",
            why=str(error),
            hint="export it again with `nsys export --type sqlite`, and copy it whole",
        ) from None
    if not len(events):
        raise InputError(
            "E322",
            f"{path} holds no events.",
            why="its tables of kernels, CUDA calls and NVTX ranges are empty or missing",
            hint=_RECORD,
        )
    metadata: dict[str, Any] = {"source": f"Nsight Systems {version}".strip()}
    if devices:
        metadata["deviceProperties"] = [{"name": name} for name in devices]
    return _trace(_one_process(events, health), reader, metadata, health)


def _one_process(events: EventRows, health: dict[str, int]) -> EventRows:
    """The events of the process that has most, and of unknown processes."""
    processes, mine = np.unique(events.process, return_inverse=True)
    # Operators weigh more than any device work, and that more than any call.
    scores = [
        tuple(np.bincount(mine[which], minlength=len(processes)).tolist())
        for which in (events.texts[:, 1] == Kind.OP, events.on_device, np.full(len(mine), True))
    ]
    ranking = list(zip(*scores, strict=True))
    known = [place for place, process in enumerate(processes.tolist()) if process != UNKNOWN]
    if len(known) < 2:
        return events
    best = max(known, key=lambda place: (ranking[place], -place))
    kept = (events.process == processes[best]) | (events.process == UNKNOWN)
    health["events_of_other_processes"] = int((~kept).sum())
    return events.rows(kept)


def _trace(
    events: EventRows, reader: TableReader, metadata: dict[str, Any], health: dict[str, int]
) -> Trace:
    thread, threads = _threads(events)
    reader.check_threads(len(threads))
    return Trace(
        name=events.texts[:, 0].astype(np.int32),
        kind=events.texts[:, 1].astype(np.int8),
        thread=thread,
        ts=events.start - min(0, int(events.start.min(initial=0))),
        dur=events.end - events.start,
        sequence=events.texts[:, 2].copy(),
        correlation=events.correlation,
        stream=events.stream.astype(np.int32),
        dims=events.texts[:, 3].astype(np.int32),
        names=reader.names.names,
        threads=threads,
        signatures=reader.names.signatures,
        metadata=metadata,
        health=health,
        left_out=reader.left_out,
    )


def _threads(events: EventRows) -> tuple[Int32, tuple[tuple[str, str], ...]]:
    """Code of each event's thread or stream, and what they are called."""
    thread = np.zeros(len(events), np.int32)
    called: list[tuple[str, str]] = []
    for on_device in (False, True):
        rows = events.on_device == on_device
        places, codes = np.unique(events.place[rows], return_inverse=True)
        thread[rows] = codes + len(called)
        for place in places.tolist():
            if on_device:
                called.append((str(place >> 32), f"stream {place & _LOW_32}"))
            elif place == UNKNOWN:
                called.append(("unknown", "unknown"))
            else:
                called.append((str(place >> 24 & _LOW_24), str(place & _LOW_24)))
    return thread, tuple(called)


def _check_holds(database: Database, path: Path) -> None:
    """Refuse a database without anything that could be read.

    Raises:
        InputError: It is no export of Nsight Systems (``E321``), or one without CUDA and NVTX
            (``E322``).
    """
    known = any(database.columns(table) for table in EVENT_TABLES)
    named = {"id", "value"} <= database.columns(STRINGS)
    if known and named:
        return
    if named and any(database.columns(table) for table in _OF_EVERY_EXPORT):
        *most, last = ["", *(what for table, what in _OTHERWISE if database.columns(table))]
        held = " and ".join(filter(None, (", ".join(most[1:]), last)))
        raise InputError(
            "E322",
            f"{path} is an export of Nsight Systems without CUDA or NVTX.",
            why=f"it holds {held} only" if held else "nothing was recorded into it",
            hint=_RECORD,
        )
    other = next((what for table, what in _OTHERS if database.columns(table)), None)
    raise InputError(
        "E321",
        f"{path} is an SQLite database, but not an export of Nsight Systems.",
        why=other or f"it has no table {STRINGS if known else EVENT_TABLES[0]}",
        hint="make one with `nsys export --type sqlite report.nsys-rep`",
    )


def _version_of(database: Database) -> str:
    """The version of nsys that wrote the export, such as ``2026.2.1.210``; empty if unknown."""
    for table in _VERSION_TABLES:
        with suppress(*UNREADABLE):
            names, values = (_column(database, table, which) for which in ("name", "value"))
            for name, value in zip(names, values, strict=False):
                if name == "EXPORT_PRODUCT_VERSION" and _EXPORT_VERSION.fullmatch(value):
                    return value
    return ""


def _column(database: Database, table: str, name: str) -> Iterator[str]:
    """A column's texts, of no more rows than such a table can have."""
    texts = (text for _, block in database.texts(table, (), name) for text in block)
    return ((text or b"").decode(errors="replace") for text in islice(texts, 1000))
