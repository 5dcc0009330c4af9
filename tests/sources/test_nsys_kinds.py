"""Exports of every kind that is published: what each holds, and the words that it gets.

The tables are those of real exports (``python -m benchmarks nsys-exports``), the rows are made.
"""

from pathlib import Path

import pytest

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.errors import InputError
from recompute_scan.report.summary import how_to_record
from recompute_scan.result import Result
from recompute_scan.trace.nsys import load_nsys
from tests.sources.nsys_builder import SCHEMA, Export

_STRINGS = "CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);"
_ABOUT = "(name TEXT NOT NULL, value TEXT);"
_SYSTEM = """CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid INTEGER, name TEXT, value TEXT);
    CREATE TABLE ProcessStreams (globalPid INTEGER, filenameId INTEGER);"""
_CALLS = """CREATE TABLE OSRT_API (start INTEGER, end INTEGER, globalTid INTEGER, nameId INTEGER);
    CREATE TABLE SCHED_EVENTS (start INTEGER, cpu INTEGER);"""


def refused(path: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        load_nsys(path)
    return caught.value


def result_of(export: Export) -> Result:
    return analyse([export.path])


@pytest.fixture
def export(tmp_path: Path) -> Export:
    return Export(tmp_path / "report.sqlite", f"{SCHEMA}; CREATE TABLE META_DATA_EXPORT {_ABOUT}")


@pytest.mark.parametrize("about", ["META_DATA_EXPORT", "EXPORT_META_DATA"])
def test_calls_into_the_system_alone_are_an_export(tmp_path: Path, about: str) -> None:
    path = Export(
        tmp_path / "osrt.sqlite", f"{_STRINGS}{_CALLS} CREATE TABLE {about} {_ABOUT}"
    ).path
    error = refused(path)
    assert error.code == "E322"
    assert "an export of Nsight Systems without CUDA or NVTX" in error.what
    assert error.why == "it holds calls into the operating system and switches of threads only"
    assert "--trace=cuda,nvtx --pytorch=autograd-shapes-nvtx" in (error.hint or "")


def test_a_recording_of_nothing_is_an_export(tmp_path: Path) -> None:
    error = refused(Export(tmp_path / "nothing.sqlite", _STRINGS + _SYSTEM).path)
    assert (error.code, error.why) == ("E322", "nothing was recorded into it")


@pytest.mark.parametrize(
    ("table", "called"),
    [
        ("read_only_op_instances", "DLProf"),
        ("rocpd_kernel_dispatch", "rocprofv3"),
        ("rocpd_op", "RPD"),
        ("CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL", "nvprof"),
    ],
)
def test_databases_of_other_profilers_are_called_by_their_names(
    tmp_path: Path, table: str, called: str
) -> None:
    error = refused(Export(tmp_path / "a.sqlite", f"CREATE TABLE {table} (id INTEGER)").path)
    assert error.code == "E321"
    assert called in (error.why or "")


def test_a_forward_pass_alone_is_said_to_be_one(export: Export) -> None:
    ranges = [("aten::linear, seq = 7, op_id = 3", 0), ("aten::addmm, seq = 8, op_id = 4", 20)]
    export.add("NVTX_EVENTS", [export.range(text, at, at + 10) for text, at in ranges])
    result = result_of(export)
    assert result.verdict == "inconclusive"
    assert "backward pass was not recorded" in (result.reason or "")


def test_inference_is_not_said_to_lack_its_backward_pass(export: Export) -> None:
    """Without gradients, autograd numbers nothing."""
    export.add("NVTX_EVENTS", [export.range("aten::linear, op_id = 3", 0, 10)])
    assert result_of(export).reason == "The trace holds no backward pass."


def test_calls_without_kernels_are_no_device_activity(export: Export) -> None:
    export.add("CUPTI_ACTIVITY_KIND_RUNTIME", [export.call("cuInit", 0, 10)])
    assert result_of(export).reason == "The trace has neither operators nor kernels."


def test_without_ranges_of_operators_the_option_that_makes_them_is_named(export: Export) -> None:
    export.add("NVTX_EVENTS", [export.range("forward", 0, 100)])
    export.add("CUPTI_ACTIVITY_KIND_RUNTIME", [export.call("cudaLaunchKernel", 5, 6, 1)])
    export.add("CUPTI_ACTIVITY_KIND_KERNEL", [export.kernel("gemm", 10, 20, 1)])
    result = result_of(export)
    assert "no operators, only kernels" in (result.reason or "")
    advice = how_to_record(result)
    assert "--pytorch=autograd-shapes-nvtx" in advice.command
    assert "emit_nvtx(record_shapes=True)" in advice.why  # for an nsys without the option


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("2026.2.1.210", "Nsight Systems 2026.2.1.210"),
        ("2022.4.2.1", "Nsight Systems 2022.4.2.1"),
        ("<b>2026</b>", "Nsight Systems"),
    ],
)
def test_the_version_of_the_profiler_stands_in_the_result(
    export: Export, value: str, said: str
) -> None:
    export.add(
        "META_DATA_EXPORT",
        [
            {"name": "EXPORT_PRODUCT_NAME", "value": "NVIDIA Nsight Systems"},
            {"name": "EXPORT_PRODUCT_VERSION", "value": value},
        ],
    )
    export.add("CUPTI_ACTIVITY_KIND_RUNTIME", [export.call("cuInit", 0, 10)])
    assert result_of(export).environment["profiler"] == said


def test_text_that_is_not_utf_8_costs_no_event(export: Export) -> None:
    export.add("CUPTI_ACTIVITY_KIND_KERNEL", [export.kernel("gemm", 10, 20, 1)])
    export.run(
        "UPDATE StringIds SET value = CAST(X'67E96D6D' AS TEXT)",
        "INSERT INTO META_DATA_EXPORT VALUES (CAST(X'FF' AS TEXT), CAST(X'FE' AS TEXT))",
    )
    trace = load_nsys(export.path)
    assert trace.names == ("g\N{REPLACEMENT CHARACTER}mm",)
    assert trace.health == {"text_repaired": 1}
