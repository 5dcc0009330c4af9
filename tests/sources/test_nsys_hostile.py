"""Databases that are no export, are damaged, or try to do harm."""

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recompute_scan.errors import InputError
from recompute_scan.recompute.study import study
from recompute_scan.trace import Kind
from recompute_scan.trace.columns import Limits
from recompute_scan.trace.nsys import load_nsys
from recompute_scan.trace.sniff import is_sqlite, refuse_report
from tests.sources.nsys_builder import Export
from tests.sources.test_nsys import named


@pytest.fixture
def export(tmp_path: Path) -> Export:
    return Export(tmp_path / "report.sqlite")


def code_of(path: Path, **how: Limits) -> str:
    with pytest.raises(InputError) as caught:
        load_nsys(path, **how)
    assert str(path) in str(caught.value)
    return caught.value.code


def test_a_file_is_told_by_its_first_bytes(export: Export) -> None:
    assert is_sqlite(export.path.read_bytes()[:16])
    assert not is_sqlite(b'{"traceEvents": ')
    assert not is_sqlite(b"")


@pytest.mark.parametrize(
    "data",
    [b"", b"no database", b"SQLite format 3\0", b"SQLite format 3\0" + bytes(84), b"{" * 5000],
    ids=["empty", "text", "magic-only", "header-of-zeros", "braces"],
)
def test_what_is_no_database_is_said(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "report.sqlite"
    path.write_bytes(data)
    assert code_of(path) in ("E320", "E321")


def test_a_missing_file_and_a_folder_are_said(tmp_path: Path) -> None:
    assert code_of(tmp_path / "none.sqlite") == "E320"
    assert code_of(tmp_path) == "E320"
    assert not (tmp_path / "none.sqlite").exists()


@pytest.mark.parametrize(
    "schema",
    [
        "CREATE TABLE users (id INTEGER)",
        "CREATE TABLE StringIds (id INTEGER, value TEXT)",
        "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, text TEXT)",
        "CREATE TABLE NVTX_EVENTS (start INTEGER); CREATE TABLE StringIds (id INTEGER)",
    ],
)
def test_another_database_is_said(tmp_path: Path, schema: str) -> None:
    assert code_of(Export(tmp_path / "a.sqlite", schema).path) == "E321"


def test_an_empty_export_is_said(export: Export) -> None:
    assert code_of(export.path) == "E322"


def test_a_report_is_told_how_to_become_readable(tmp_path: Path) -> None:
    error = refuse_report(tmp_path / "report.nsys-rep")
    assert error.code == "E323"
    assert "nsys export --type sqlite report.nsys-rep" in str(error)


def test_columns_that_an_older_version_lacks(tmp_path: Path) -> None:
    export = Export(
        tmp_path / "old.sqlite",
        """CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, shortName INT);
        CREATE TABLE NVTX_EVENTS (start INT, end INT, text TEXT)""",
    )
    export.run(
        "INSERT INTO StringIds VALUES (3, 'gemm')",
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (5, 9, 3), (9, 12, 4)",
        "INSERT INTO NVTX_EVENTS VALUES (0, 20, 'aten::mm, seq = 2'), (1, 2, NULL)",
    )
    trace = load_nsys(export.path)
    assert [trace.names[code] for code in trace.name] == ["gemm", "", "aten::mm", ""]
    assert trace.correlation.tolist() == [-1] * 4
    assert trace.stream.tolist() == [-1] * 4
    assert trace.health == {"events_without_name": 2}


def test_values_of_the_wrong_kind_are_unknown(export: Export) -> None:
    good = export.kernel("gemm", 10, 20)
    bad: list[dict[str, Any]] = [
        {"start": "ten"},
        {"start": b"\0\1"},
        {"end": 1.5},
        {"start": 2**62},
        {"start": -(2**63)},
        {"correlationId": "five"},
        {"correlationId": -5},
        {"correlationId": 2**63 - 1},
        {"streamId": 2**40},
        {"deviceId": -1},
        {"demangledName": "gemm", "shortName": b"gemm"},
        {"end": 5},
    ]
    export.add("CUPTI_ACTIVITY_KIND_KERNEL", [good | change for change in bad])
    trace = load_nsys(export.path)
    assert len(trace) == 7
    assert trace.correlation.tolist() == [-1, -1, -1, 1, 1, 1, 1]
    assert trace.stream.tolist() == [7, 7, 7, -1, 7, 7, 7]
    assert trace.dur.tolist() == [10] * 6 + [0]
    assert trace.health == {
        "events_without_time": 5,
        "events_without_name": 1,
        "negative_durations": 1,
    }


def test_texts_that_are_no_text(export: Export) -> None:
    export.add(
        "NVTX_EVENTS",
        [
            export.range("x", 0, 1) | {"text": b"blob"},
            export.range("x", 2, 3) | {"text": 7},
            export.range("a\0b<script>", 4, 5),
        ],
    )
    export.run("INSERT INTO NVTX_EVENTS (start, end, eventType, text) "
               "VALUES (6, 7, 59, CAST(x'61ff62' AS TEXT))")  # fmt: skip
    trace = load_nsys(export.path)
    texts = [trace.names[code] for code in trace.name]
    # A TEXT column turns numbers into text by itself, and SQL's texts end at a NUL.
    assert texts == ["", "7", "a", "a\ufffdb"]
    assert trace.health == {"events_without_name": 1, "text_repaired": 1}


def test_long_names_are_cut(export: Export) -> None:
    export.add("NVTX_EVENTS", [export.range("n" * 500_000, n, n + 1) for n in (0, 1)])
    trace = load_nsys(export.path, Limits(name_chars=4096))
    assert [trace.names[code] for code in trace.name] == ["n" * 4096] * 2
    assert trace.health == {"names_shortened": 1}


def test_more_events_or_names_than_allowed(export: Export) -> None:
    export.add("NVTX_EVENTS", [export.range(f"range {n}", n, n + 1) for n in range(30)])
    assert code_of(export.path, limits=Limits(events=29)) == "E313"
    assert code_of(export.path, limits=Limits(distinct=20)) == "E314"
    assert len(load_nsys(export.path, Limits(events=30, distinct=60))) == 30


def test_names_that_a_cut_table_lacks(export: Export) -> None:
    export.add(
        "CUPTI_ACTIVITY_KIND_KERNEL", [export.kernel("gemm", 1, 2), export.kernel("b", 3, 4)]
    )
    export.run("DELETE FROM StringIds WHERE value = 'b'")
    assert named(export.path, Kind.KERNEL) == ["gemm", ""]
    assert load_nsys(export.path).health == {"events_without_name": 1}


def full(export: Export, rows: int = 3000) -> Export:
    export.add(
        "NVTX_EVENTS",
        [export.range(f"aten::mm, seq = {n}, op_id = {n}", n, n + 1) for n in range(rows)],
    )
    export.add(
        "CUPTI_ACTIVITY_KIND_KERNEL",
        [export.kernel(f"gemm {n % 50}", n, n + 1, n) for n in range(rows)],
    )
    return export


@pytest.mark.parametrize("percent", range(0, 100, 4))
def test_a_cut_file_is_read_or_refused(export: Export, percent: int) -> None:
    data = full(export).path.read_bytes()
    export.path.write_bytes(data[: len(data) * percent // 100])
    try:
        trace = load_nsys(export.path)
    except InputError as error:
        assert error.code in ("E320", "E321", "E322")
    else:
        assert trace.health["tables_damaged"] >= 1
        assert 0 < len(trace) < 6000


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_file_is_read_or_refused(export: Export, seed: int) -> None:
    random = np.random.default_rng(seed)
    data = bytearray(full(export, 400).path.read_bytes())
    for at in random.integers(16 if seed % 2 else 0, len(data), size=seed + 1):
        data[at] = random.integers(256)
    export.path.write_bytes(data)
    try:
        trace = load_nsys(export.path)
    except InputError as error:
        assert error.code in ("E320", "E321", "E322")
    else:
        study(trace)


def edit_schema(path: Path, table: str, sql: str) -> None:
    """Put another definition in place of a table's own."""
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET sql = ? WHERE name = ?", (sql, table))
    connection.close()


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"


@pytest.mark.parametrize(
    "harm",
    [
        lambda export: export.run(
            "DROP TABLE NVTX_EVENTS",
            f"CREATE VIEW NVTX_EVENTS AS {ENDLESS} i AS start, i AS end, 59 AS eventType, "
            "'x' AS text FROM n",
        ),
        lambda export: export.run(
            "DROP TABLE NVTX_EVENTS",
            "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, "
            "text TEXT AS (hex(zeroblob(400000000))))",
            "INSERT INTO NVTX_EVENTS VALUES (1, 2, 59)",
        ),
        lambda export: export.run(
            "CREATE INDEX slow ON NVTX_EVENTS (start, end, eventType, hex(zeroblob(1000)))"
        ),
        lambda export: export.run(
            "CREATE TRIGGER reads AFTER INSERT ON NVTX_EVENTS BEGIN DELETE FROM StringIds; END"
        ),
        lambda export: edit_schema(
            export.path, "NVTX_EVENTS", "CREATE VIRTUAL TABLE NVTX_EVENTS USING fts5(start, text)"
        ),
        lambda export: edit_schema(export.path, "NVTX_EVENTS", "CREATE TABLE StringIds (x)"),
        lambda export: edit_schema(export.path, "NVTX_EVENTS", "SELECT load_extension('/x.so')"),
        lambda export: export.run("ALTER TABLE NVTX_EVENTS RENAME TO \"NVTX_EVENTS\"\"; --\""),
    ],
    ids=["view", "generated", "index", "trigger", "virtual", "twice", "no-table", "quoted"],
)  # fmt: skip
def test_a_schema_that_runs_something_is_not_run(
    export: Export, harm: Callable[[Export], None]
) -> None:
    export.add("CUPTI_ACTIVITY_KIND_KERNEL", [export.kernel("gemm", 10, 20)])
    harm(export)
    before = export.path.read_bytes()
    began = time.monotonic()
    try:
        trace = load_nsys(export.path)
    except InputError as error:
        assert error.code == "E320"
    else:
        assert "gemm" in trace.names
        assert len(trace) <= 2
    assert time.monotonic() - began < 5
    assert export.path.read_bytes() == before
    assert [file.name for file in export.path.parent.iterdir()] == [export.path.name]
