"""Rows and texts of Nsight Systems' SQLite database.

Tables and columns are those of the "SQLite Export Schema Reference" in NVIDIA's Nsight Systems
documentation (``nsys-exporter/exported_data.html``). Tables are made lazily there and columns
differ between versions, so a column that is missing is unknown for every event, and a table that
is missing has no events.

SQLite files from anywhere, as blocks of numbers and texts.

A database is a program's file format and a program: views, generated columns, virtual tables and
expression indexes run what their author wrote. So a file is opened read-only and immutable,
nothing but the plain columns of plain tables is ever named in a query, indexes are not used, and
an authorizer refuses all else. These are the precautions of https://sqlite.org/security.html
for database files of unknown origin.

Names of Nsight Systems' events: numbers in the tables, texts in ``StringIds``.

A name is decoded once per distinct text, not once per event, except for NVTX ranges, whose texts
mostly differ. What a text says is four numbers: code of the
name, kind, sequence number, code of the shapes.

Under ``torch.autograd.profiler.emit_nvtx`` (which ``nsys profile --pytorch=autograd-nvtx`` and
``autograd-shapes-nvtx`` switch on) each operator and each autograd node becomes one range, its
text put together in ``torch/csrc/profiler/util.cpp`` (``getNvtxStr``)::

    name, seq = 12, op_id = 345, sizes = [[2, 8, 16], []], input_op_ids = [(344,0), (0,-1)]

Each part but the name may be missing: the sequence number where it is negative, ``op_id`` before
torch 1.10, sizes without ``record_shapes``. Nodes said ``stashed seq`` before torch 1.5.
"""

from __future__ import annotations

import re
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from msgspec import Struct, structs

from recompute_scan.trace.columns import (
    OPERATOR,
    RANGE,
    Bool,
    Int64,
    Kind,
    Limits,
    refuse_distinct,
    refuse_events,
)

# What is in a block where the file has no integer.
UNKNOWN = int(np.iinfo(np.int64).min)
# What a damaged file raises: Python decodes SQLite's own messages strictly, and they may quote it.
UNREADABLE = (sqlite3.Error, UnicodeDecodeError)
_BLOCK = 1 << 14
_TEXT_BLOCK = 1 << 9
# Longer texts are cut: none that means something to us comes near it.
TEXT_CHARS = 1 << 16
_LONGEST_CELL = 1 << 24
_FUNCTIONS = ("typeof", "substr")
_PRECAUTIONS = ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0")


@contextmanager
def open_database(path: Path) -> Iterator[Database]:
    """The file's tables; nothing is ever written, no lock or journal is made.

    Raises:
        sqlite3.Error, UnicodeDecodeError: It cannot be opened, or its schema cannot be read; so
            everywhere in this module, see :data:`UNREADABLE`.
    """
    address = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    with closing(sqlite3.connect(address, uri=True, isolation_level=None)) as connection:
        for setting in _PRECAUTIONS:
            connection.execute(f"PRAGMA {setting}")
        if sys.version_info >= (3, 11):
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_CELL)
        connection.text_factory = bytes
        connection.set_authorizer(_authorize)
        yield Database(connection)


class Database:
    """Plain tables of an open file; made by :func:`open_database`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        # Views and virtual tables have no page of their own.
        rows = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0"
        )
        self._tables = {name.decode(errors="replace") for (name,) in rows}

    def columns(self, table: str) -> frozenset[str]:
        """Names of a table's stored columns; none where there is no such table.

        Raises:
            sqlite3.Error: The schema cannot be read.
        """
        if table not in self._tables:
            return frozenset()
        # Generated and hidden columns are not among these.
        rows = self._connection.execute(f"PRAGMA table_info({_quoted(table)})")
        return frozenset(row[1].decode(errors="replace") for row in rows)

    def numbers(self, table: str, columns: Sequence[str]) -> Iterator[Int64]:
        """Blocks of rows, one array column for each name.

        :data:`UNKNOWN` stands for what is no integer, and for columns that do not exist.

        Raises:
            sqlite3.Error: From here on the table cannot be read.
        """
        for rows in self._blocks(table, _integers(self.columns(table), columns), _BLOCK):
            yield np.array(rows, np.int64)

    def texts(
        self, table: str, columns: Sequence[str], text: str
    ) -> Iterator[tuple[Int64, list[bytes | None]]]:
        """Blocks of rows: numbers as :meth:`numbers` has them, and one column of text.

        ``None`` stands for what is no text; texts are cut to :data:`TEXT_CHARS` characters.

        Raises:
            sqlite3.Error: From here on the table cannot be read.
        """
        present = self.columns(table)
        wanted = _integers(present, columns)
        name = _quoted(text)
        cut = f"CASE typeof({name}) WHEN 'text' THEN substr({name}, 1, {TEXT_CHARS}) END"
        wanted.append(cut if text in present else "NULL")
        for rows in self._blocks(table, wanted, _TEXT_BLOCK):
            *numbers, found = zip(*rows, strict=True)
            yield np.array(numbers, np.int64).T, list(found)

    def _blocks(self, table: str, wanted: Sequence[str], size: int) -> Iterator[list[tuple]]:  # type: ignore[type-arg]
        if table not in self._tables:
            return
        # The names are ours, not the file's. An index could hold what its author computed.
        query = f"SELECT {', '.join(wanted)} FROM {_quoted(table)} NOT INDEXED"  # noqa: S608
        with closing(self._connection.execute(query)) as cursor:
            while rows := cursor.fetchmany(size):
                yield rows


def _integers(present: frozenset[str], columns: Sequence[str]) -> list[str]:
    # A literal of -2**63 would be read as a float.
    unknown = f"({UNKNOWN + 1} - 1)"
    return [
        f"CASE typeof({_quoted(name)}) WHEN 'integer' THEN {_quoted(name)} ELSE {unknown} END"
        if name in present
        else unknown
        for name in columns
    ]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _authorize(
    action: int, first: str | None, second: str | None, _database: str | None, inside: str | None
) -> int:
    """Reading tables is allowed, by our own statements; nothing else is."""
    if inside is not None:
        return sqlite3.SQLITE_DENY
    allowed = (
        action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ)
        or (action == sqlite3.SQLITE_FUNCTION and second in _FUNCTIONS)
        or (action == sqlite3.SQLITE_PRAGMA and first == "table_info")
    )
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


_OPERATORS = ("aten::", "autograd::engine::", "torch::autograd::", "prims::")
_SIZES = re.compile(r"\[[\[\], 0-9]*\]")
# Numbers of autograd have 64 bits; 18 digits fit into them.
_DIGITS = 18


class Range(NamedTuple):
    """What the text of one range says.

    Attributes:
        name: The operator's, node's or annotation's own name.
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


Said = tuple[int, int, int, int]
NAMELESS = -1
# The driver's version of an entry point: cudaLaunchKernel_v7000. Kineto leaves it out.
_VERSION = re.compile(r"_v\d+(_ptsz|_ptds)?$")


class Texts:
    """Distinct names and shapes, numbered as they come.

    Args:
        most_chars: Longer names are cut and counted as ``names_shortened``.
        health: Counters to add to.
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
                self._count("names_shortened")
        return self._codes.setdefault(name, len(self._codes))

    def kernel(self, text: bytes) -> Said:
        """What a device activity's text says: its name."""
        return self.code(self._decode(text)), Kind.KERNEL, -1, 0

    def call(self, text: bytes) -> Said:
        """What a CUDA call's text says: its name, without the version of its entry point."""
        return self.code(_VERSION.sub("", self._decode(text))), Kind.RUNTIME, -1, 0

    def range(self, text: bytes) -> Said:
        """What an NVTX range's text says: all four."""
        decoded = self._decode(text)
        said = parse_range(decoded)
        # Shapes that were cut are no shapes.
        sizes = said.sizes if len(decoded) < TEXT_CHARS else ""
        dims = self._sizes.setdefault(sizes, len(self._sizes))
        return self.code(said.name), said.kind, said.sequence, dims

    def _decode(self, text: bytes) -> str:
        try:
            return text.decode()
        except UnicodeDecodeError:
            self._count("text_repaired")
            return text.decode(errors="replace")

    def _count(self, counter: str) -> None:
        self._health[counter] = self._health.get(counter, 0) + 1


class Wanted:
    """The rows of ``StringIds`` that one table's events refer to.

    Args:
        strings: Row for each event, ``none`` where its name is known or lacking.
        none: See ``strings``.
        reading: What a text of this table says.
    """

    def __init__(self, strings: Int64, none: int, reading: Callable[[bytes], Said]) -> None:
        self._asks = strings != none
        self._rows, self._where = np.unique(strings[self._asks], return_inverse=True)
        self._said = np.full((len(self._rows), 4), NAMELESS, np.int64)
        self._reading = reading

    def offer(self, rows: Int64, texts: Sequence[bytes | None]) -> None:
        """Take what is wanted of some rows of ``StringIds``."""
        if not len(self._rows):
            return
        at = np.minimum(self._rows.searchsorted(rows), len(self._rows) - 1)
        for row in np.flatnonzero(self._rows[at] == rows).tolist():
            if (text := texts[row]) is not None:
                self._said[at[row]] = self._reading(text)

    def fill(self, said: Int64) -> None:
        """Write what the texts say over the events' rows of ``said``, where a text was found."""
        found = self._said[self._where]
        known = found[:, 0] != NAMELESS
        said[np.flatnonzero(self._asks)[known]] = found[known]


def look_up(wanted: Iterable[Wanted], blocks: Iterable[tuple[Int64, list[bytes | None]]]) -> None:
    """Go through ``StringIds`` once, for all tables."""
    wanted = list(wanted)
    for numbers, texts in blocks:
        for one in wanted:
            one.offer(numbers[:, 0], texts)


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
