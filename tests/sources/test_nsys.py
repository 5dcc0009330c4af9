"""Nsight Systems' export: its events as columns, its verdicts, and files that try to do harm."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recompute_scan import trace as traces
from recompute_scan.errors import InputError
from recompute_scan.model import link_kernels, nest
from recompute_scan.pipeline import analyse
from recompute_scan.recompute.facts import study
from recompute_scan.trace import Kind, load
from recompute_scan.trace.limits import Limits
from recompute_scan.trace.nsys import is_sqlite, load_nsys, refuse_report
from tests.cases.recorded import recorded
from tests.sources.nsys_builder import DOMAIN, MARK, START_END, Export, from_trace
from tests.trace_builder import launch, loaded, node, op, step, thread


@pytest.fixture
def export(tmp_path: Path) -> Export:
    return Export(tmp_path / "report.sqlite")


def named(path: Path, kind: Kind) -> list[str]:
    trace = load_nsys(path)
    return [trace.names[code] for code in trace.name[trace.kind == kind]]


def test_kernels_and_copies_with_their_streams_and_numbers(export: Export) -> None:
    export.add(
        "CUPTI_ACTIVITY_KIND_KERNEL",
        [
            export.kernel("void gemm<float>(int)", 10, 40, correlation=5),
            export.kernel("ncclDevKernel_AllGather", 20, 30, correlation=6, stream=13),
        ],
    )
    export.add(
        "CUPTI_ACTIVITY_KIND_MEMCPY", [export.copy(1, 50, 60, 7), export.copy(99, 60, 70, 8)]
    )
    export.add("CUPTI_ACTIVITY_KIND_MEMSET", [export.fill(80, 81, 9)])
    export.run("INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA A100-PCIE-40GB', '')")
    trace = load_nsys(export.path)
    assert [trace.names[code] for code in trace.name] == [
        "void gemm<float>(int)",
        "ncclDevKernel_AllGather",
        "Memcpy HtoD",
        "Memcpy",
        "Memset",
    ]
    assert trace.kind.tolist() == [Kind.KERNEL] * 2 + [Kind.COPY] * 3
    assert trace.ts.tolist() == [10, 20, 50, 60, 80]
    assert trace.dur.tolist() == [30, 10, 10, 10, 1]
    assert trace.stream.tolist() == [7, 13, 7, 7, 7]
    assert trace.correlation.tolist() == [5, 6, 7, 8, 9]
    streams = [trace.threads[code] for code in trace.thread]
    assert streams == [("0", "stream 7"), ("0", "stream 13")] + [("0", "stream 7")] * 3
    assert trace.metadata["deviceProperties"] == [{"name": "NVIDIA A100-PCIE-40GB"}]
    assert trace.health == {}


def test_kernels_hang_on_the_calls_that_launched_them(export: Export) -> None:
    export.add(
        "NVTX_EVENTS",
        [export.range("aten::mm, seq = 4, op_id = 9, sizes = [[2, 3], [3, 4]]", 0, 100, tid=101)],
    )
    export.add(
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        [
            export.call("cudaLaunchKernel_v7000", 10, 20, correlation=5, tid=101),
            export.call("cudaStreamSynchronize_v3020", 30, 40, correlation=6, tid=102),
        ],
    )
    export.add("CUPTI_ACTIVITY_KIND_KERNEL", [export.kernel("gemm", 500, 600, correlation=5)])
    trace = load_nsys(export.path)
    calls = nest(trace)
    kernels = link_kernels(trace, calls)
    (launch_row,) = kernels.launch.tolist()
    assert trace.names[calls.name[launch_row]] == "cudaLaunchKernel"
    parent = calls.parent[launch_row]
    assert trace.names[calls.name[parent]] == "aten::mm"
    assert (calls.sequence[parent], trace.signatures[calls.dims[parent]]) == (4, "[[2, 3], [3, 4]]")
    assert trace.threads[calls.thread[parent]] == ("100", "101")


@pytest.mark.parametrize("by_id", [False, True])
def test_ranges_in_the_row_and_by_number(export: Export, by_id: bool) -> None:
    export.add(
        "NVTX_EVENTS",
        [
            export.range("ProfilerStep#1", 0, 90, by_id=by_id),
            export.range("aten::mm, seq = 7, op_id = 2, sizes = [[1]]", 10, 20, by_id=by_id),
            export.range("aten::mm, seq = 8, op_id = 3, sizes = [[1]]", 30, 40, by_id=by_id),
        ],
    )
    trace = load_nsys(export.path)
    assert trace.kind.tolist() == [Kind.ANNOTATION, Kind.OP, Kind.OP]
    assert [trace.names[code] for code in trace.name] == ["ProfilerStep#1", "aten::mm", "aten::mm"]
    assert trace.sequence.tolist() == [-1, 7, 8]
    assert [trace.signatures[code] for code in trace.dims] == ["", "[[1]]", "[[1]]"]
    assert trace.health == {}


def test_only_ranges_that_nest_are_events(export: Export) -> None:
    export.add(
        "NVTX_EVENTS",
        [
            export.range("kept", 0, 10),
            export.range("crosses threads", 0, 10, eventType=START_END),
            export.range("a moment", 5, None, eventType=MARK),
            export.range("NCCL", 0, None, eventType=DOMAIN),
            export.range("still open", 5, None),
        ],
    )
    assert named(export.path, Kind.ANNOTATION) == ["kept"]
    trace = load_nsys(export.path)
    assert trace.health == {"ranges_without_end": 1}
    assert trace.left_out == 3


def test_of_several_processes_the_one_with_operators_is_read(export: Export) -> None:
    export.add(
        "NVTX_EVENTS",
        [
            export.range("worker", 0, 10, pid=300),
            export.range("aten::mm, op_id = 1", 0, 10, pid=200),
        ],
    )
    export.add(
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        [export.call("cudaLaunchKernel", 1, 2, 5, pid=pid) for pid in (200, 300, 300)],
    )
    export.add(
        "CUPTI_ACTIVITY_KIND_KERNEL",
        [
            export.kernel("mine", 50, 60, 5, pid=200),
            export.kernel("theirs", 50, 60, 5, pid=300),
            export.kernel("whose", 50, 60, 6) | {"globalPid": None},
        ],
    )
    trace = load_nsys(export.path)
    assert named(export.path, Kind.KERNEL) == ["mine", "whose"]
    assert {pid for pid, tid in trace.threads if not tid.startswith("stream")} == {"200"}
    assert trace.health == {"events_of_other_processes": 4}


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize(
    "case", ["r_in_r", "n_in_r", "n_inside", "selective_matmuls", "no_checkpoint"]
)
def test_the_verdict_is_that_of_the_same_run_seen_by_kineto(
    tmp_path: Path, case: str, by_id: bool
) -> None:
    kineto = load(recorded(case)[0])
    nsys = load_nsys(from_trace(kineto, tmp_path / "report.sqlite", by_id=by_id))
    expected, found = study(kineto).judgement, study(nsys).judgement
    assert replace(found, mean=None, share=None) == replace(expected, mean=None, share=None)
    assert found.mean == pytest.approx(expected.mean, rel=1e-6)
    assert found.share == pytest.approx(expected.share, rel=1e-6)


def test_kernels_follow_their_operators_as_in_kineto(tmp_path: Path) -> None:
    forward = op("aten::linear", launch("gemm"), seq=1, dims=[[2, 3]])
    again = op("aten::linear", launch("gemm"), seq=2, dims=[[2, 3]])
    kineto = loaded(
        thread(
            step(0, forward, node("AddmmBackward0", again, op("aten::mm", launch("bgemm")), seq=1))
        )
    )
    nsys = load_nsys(from_trace(kineto, tmp_path / "report.sqlite", by_id=False))
    expected, found = study(kineto), study(nsys)
    assert found.judgement == expected.judgement
    assert found.work.unlaunched == 0
    assert sorted(found.work.time.tolist()) == sorted(expected.work.time.tolist())


def test_a_recording_of_kernels_alone_is_inconclusive_with_its_reason(
    export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = range(1, 20)
    export.add(
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        [export.call("cudaLaunchKernel", 10 * n, 10 * n + 5, n) for n in launches],
    )
    export.add(
        "CUPTI_ACTIVITY_KIND_KERNEL",
        [export.kernel("flash_fwd_kernel", 100 * n, 100 * n + 50, n) for n in launches],
    )
    monkeypatch.setattr(traces, "load", load_nsys)
    result = analyse([export.path])
    assert result.verdict == "inconclusive"
    assert result.reason is not None
    assert "no operators" in result.reason


# What is no export, and what is a damaged one.


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
