"""Nsight Systems' export: its events as columns, and its verdicts."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from recompute_scan import trace
from recompute_scan.analysis.pipeline import analyse
from recompute_scan.recompute.study import study
from recompute_scan.trace import Kind, load
from recompute_scan.trace.calls import link_kernels, nest
from recompute_scan.trace.nsys import load_nsys
from tests.cases.recorded import recorded
from tests.sources.nsys_builder import DOMAIN, MARK, START_END, Export, from_trace
from tests.trace_builder import launch, loaded, node, op, step, thread


@pytest.fixture
def export(tmp_path: Path) -> Export:
    return Export(tmp_path / "report.sqlite")


def named(path: Path, kind: int) -> list[str]:
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
    monkeypatch.setattr(trace, "load", load_nsys)
    result = analyse([export.path])
    assert result.verdict == "inconclusive"
    assert result.reason is not None
    assert "no operators" in result.reason
