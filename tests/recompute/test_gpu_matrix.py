"""The script that records on a GPU: what of it runs on a CPU, runs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks import accuracy, gpu_matrix
from benchmarks._frame import call
from benchmarks.gpu_matrix import main

from recompute_scan.analysis.pipeline import analyse
from tests.cases.distributed import leave_group
from tests.cases.gpu_matrix import WAYS, cells
from tests.recompute.attention_traces import Layout, each_layer, recorded
from tests.recompute.training import checkpointed_step
from tests.trace_builder import as_bytes, document, thread


@pytest.fixture(autouse=True)
def alone_again() -> Iterator[None]:
    yield
    leave_group()


def test_all_pairs_in_all_ways_with_all_backends() -> None:
    every = list(cells(list(WAYS), ["flash", "efficient", "cudnn"]))
    assert len(every) == len({cell.name for cell in every}) == 9 * 3 * 3
    verdicts = [cell.case.verdict for cell in cells(["graph"], ["flash"])]
    # Rows of the nesting table: nothing, reentrant, non-reentrant outside.
    assert verdicts == [
        "none", "full", "full",
        "full", "doubled", "doubled",
        "full", "doubled", "full",
    ]  # fmt: skip


@pytest.mark.slow
def test_what_a_cpu_can_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(main, ["--device", "cpu", "--way", "plain", "--keep", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["18 of 18 right", "0 cells not recorded"]
    truths = [json.loads(file.read_text()) for file in tmp_path.glob("*.truth.json")]
    assert len(truths) == 9
    assert len(list(tmp_path.glob("*.json.gz"))) == 18


def test_a_cell_that_cannot_be_recorded_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("No available kernel.\nAborting execution.")

    monkeypatch.setattr(accuracy, "record", broken)
    assert call(main, ["--device", "cpu", "--way", "plain"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "not recorded: plain.r_in_n.any: RuntimeError: No available kernel." in lines
    assert lines[-1] == "9 cells not recorded"


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert call(main, []) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_a_trace_without_its_operators_keeps_the_rest(tmp_path: Path) -> None:
    kernels = recorded(Layout(4, each_layer(4, 2)))
    last = max(event["ts"] + event["dur"] for event in kernels)
    shown = document(thread(checkpointed_step(99)))["traceEvents"]
    events = kernels + [{**event, "ts": event["ts"] + last + 9} for event in shown]
    trace = tmp_path / "plain.r_in_n.flash.autograd.json.gz"
    trace.write_bytes(gzip.compress(as_bytes({"traceEvents": events})))
    assert analyse([trace]).evidence_level == "autograd"
    result = analyse([gpu_matrix._without_operators(trace)])
    assert (result.verdict, result.evidence_level) == ("doubled", "kernels")
