"""SQLite files from anywhere, as blocks of numbers and texts.

A database is a file format and a program: views, generated columns, virtual tables and expression
indexes run their author's code. So a file is opened read-only and immutable, queries name nothing
but the plain columns of plain tables, indexes are not used, and an authorizer refuses all else.
These are the precautions of https://sqlite.org/security.html for files of unknown origin.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from recompute_scan.trace.columns import Int64

# Stands in a block where the file has no integer.
UNKNOWN = int(np.iinfo(np.int64).min)
# Errors from a damaged file: Python decodes SQLite's messages strictly, and they may quote it.
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
        sqlite3.Error, UnicodeDecodeError: It cannot be opened, or its schema cannot be read. All
            methods of :class:`Database` raise these, see :data:`UNREADABLE`.
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
        # Views and virtual tables have no page.
        rows = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0"
        )
        self._tables = {name.decode(errors="replace") for (name,) in rows}

    def columns(self, table: str) -> frozenset[str]:
        """Names of a table's stored columns; none where there is no such table."""
        if table not in self._tables:
            return frozenset()
        # Generated and hidden columns are not among these.
        rows = self._connection.execute(f"PRAGMA table_info({_quoted(table)})")
        return frozenset(row[1].decode(errors="replace") for row in rows)

    def numbers(self, table: str, columns: Sequence[str]) -> Iterator[Int64]:
        """Blocks of rows, one array column for each name.

        :data:`UNKNOWN` stands for values that are no integer, and for columns that do not exist.
        """
        for rows in self._blocks(table, _integers(self.columns(table), columns), _BLOCK):
            yield np.array(rows, np.int64)

    def texts(
        self, table: str, columns: Sequence[str], text: str
    ) -> Iterator[tuple[Int64, list[bytes | None]]]:
        """Blocks of rows: numbers as :meth:`numbers` has them, and one column of text.

        ``None`` stands for a value that is no text; texts are cut to :data:`TEXT_CHARS` characters.
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
