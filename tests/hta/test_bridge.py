"""Frames of ours in HTA, against counting by hand; needs HTA itself (``make hta``)."""

import logging
import warnings
from pathlib import Path

import numpy as np
import pytest
from hta.analyzers.breakdown_analysis import BreakdownAnalysis

import recompute_scan as rs
from recompute_scan.analysis.pipeline import analyse
from recompute_scan.hta_bridge import break_down, to_hta
from recompute_scan.report.render import render_html, render_markdown, render_text
from recompute_scan.trace import Kind, Trace, load
from tests.present import present
from tests.recompute.training import training_step
from tests.trace_builder import launch, loaded, op, thread

PUBLIC = Path(__file__).resolve().parents[2] / "traces" / "public"
ON_GPU = [
    "a100-resnet-ddp.json.gz",
    "h100-nanogpt-compiled.json.gz",
    "mi300x-resnet-checkpointed.json.gz",
    "v100-megatron-tp2-rank0.json.gz",
]


def busy_by_hand(trace: Trace) -> tuple[float, float]:
    """From the first kernel to the last, and in how much of it something ran; ms, to 1 µs."""
    mine = np.isin(trace.kind, (Kind.KERNEL, Kind.COPY))
    start, end = trace.ts[mine].astype(np.int64), (trace.ts + trace.dur)[mine].astype(np.int64)
    edges = np.concatenate((start, end))
    steps = np.concatenate((np.ones(len(start), np.int64), -np.ones(len(end), np.int64)))
    order = np.lexsort((-steps, edges))
    running = np.cumsum(steps[order])[:-1]
    busy = np.diff(edges[order])[running > 0].sum()
    return float(end.max() - start.min()) / 1e6, float(busy) / 1e6


@pytest.mark.parametrize("name", ON_GPU)
def test_its_breakdown_of_our_frames_is_the_one_by_hand(name: str) -> None:
    trace = load(PUBLIC / name)
    found = present(break_down(trace))
    whole, busy = busy_by_hand(trace)
    assert found.kernel_time_ms == pytest.approx(whole, rel=1e-6)
    assert found.idle_pct == pytest.approx(100 * (1 - busy / whole), abs=0.02)
    assert found.idle_pct + found.compute_pct + found.non_compute_pct == pytest.approx(
        100, abs=0.05
    )
    assert sum(found.kernel_types.values()) == pytest.approx(100, abs=0.3)


def test_overlap_and_kinds_of_kernels() -> None:
    """10 ms of a product, 8 ms of communication of which 6 lie beside it, 2 ms of a copy."""
    calls = [
        op("aten::mm", launch("ampere_sgemm", 10_000.0, at=1000.0)),
        op("c10d::allreduce_", launch("ncclDevKernel_AllReduce", 8000.0, stream=9, at=5000.0)),
        op("aten::copy_", launch("Memcpy DtoD", 2000.0, at=13_000.0, category="gpu_memcpy")),
    ]
    found = present(break_down(loaded(thread(training_step(0, *calls)))))
    assert found.kernel_time_ms == pytest.approx(14.0)
    assert found.overlap_pct == pytest.approx(75.0)
    assert found.compute_pct == pytest.approx(100 * 10 / 14, abs=0.01)
    assert found.kernel_types == pytest.approx(
        {
            "computation": 28.6,
            "computation overlapping communication": 42.9,
            "communication": 14.3,
            "memory": 14.3,
        }
    )


def test_without_communication_the_overlap_is_unknown() -> None:
    found = present(break_down(loaded(thread(op("aten::mm", launch("gemm", 10.0))))))
    assert found.overlap_pct is None


def test_without_a_gpu_there_is_nothing_to_break_down() -> None:
    assert break_down(loaded(thread(op("aten::mm")))) is None


def test_ranks_stand_side_by_side() -> None:
    names = [PUBLIC / f"v100-megatron-tp2-rank{rank}.json.gz" for rank in (0, 1)]
    made = rs.analyze(names).to_hta()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of newer pandas, at HTA's calls
        table = BreakdownAnalysis.get_temporal_breakdown(made, visualize=False)
    assert table["rank"].tolist() == [0, 1]
    assert to_hta({}).traces == {}


def test_the_report_shows_it_and_its_logger_stays_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    result = analyse([PUBLIC / ON_GPU[2]], hta=True)
    assert result.hta is not None
    assert "Holistic Trace Analysis" in render_html(result)
    assert not [record for record in caplog.records if record.name.startswith("hta")]


@pytest.mark.parametrize("name", ON_GPU)
def test_our_own_count_agrees(name: str) -> None:
    """Up to what it rounds: percentages to two digits."""
    hta = present(analyse([PUBLIC / name], hta=True).hta)
    assert present(hta.own).kernel_time_ms == pytest.approx(hta.kernel_time_ms, rel=1e-6)
    for part in ("idle_pct", "compute_pct", "non_compute_pct", "overlap_pct"):
        theirs, ours = getattr(hta, part), getattr(present(hta.own), part)
        assert (ours is None) == (theirs is None)
        assert ours is None or ours == pytest.approx(theirs, abs=0.02), part


def test_with_several_ranks_it_says_whose_it_is() -> None:
    names = [PUBLIC / f"v100-megatron-tp2-rank{rank}.json.gz" for rank in (0, 1)]
    result = analyse(names, hta=True)
    for written in (render_text(result, color=False), render_markdown(result), render_html(result)):
        assert "Holistic Trace Analysis of rank 0" in written
