"""The nesting table of a GPU: what of it runs on a CPU, runs."""

import gzip
from pathlib import Path
from typing import Any

import pytest
from benchmarks import accuracy
from benchmarks._frame import call
from benchmarks.accuracy import main

from recompute_scan.analysis.pipeline import analyse
from tests.cases.case import Case, record
from tests.cases.coarse import without_operators
from tests.cases.gpu_matrix import GPU
from tests.cases.truth import Truth
from tests.recompute.attention_traces import Layout, each_layer, recorded
from tests.recompute.training import checkpointed_step
from tests.trace_builder import as_bytes, document, thread

pytestmark = pytest.mark.usefixtures("alone_again")


def test_all_pairs_in_all_ways() -> None:
    every = [case for cases in GPU.values() for case in cases]
    assert len(every) == len({case.name for case in every}) == 9 * 3
    verdicts = [case.verdict for case in GPU["gpu-graph"]]
    # Rows of the nesting table: nothing, reentrant, non-reentrant outside.
    assert verdicts == [
        "none", "full", "full",
        "full", "doubled", "doubled",
        "full", "doubled", "full",
    ]  # fmt: skip


@pytest.mark.parametrize(("reason", "status"), [("No available kernel.", 0), ("no memory", 1)])
def test_a_cell_that_cannot_be_recorded_is_named(
    reason: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(case: Case, *rest: Any) -> Truth:
        if case.name == "plain_r_in_n":
            raise RuntimeError(f"{reason}\nAborting.")
        return record(case, *rest)

    monkeypatch.setattr(accuracy, "record", broken)
    cells = ["plain_r_in_n", "plain_none_in_none", "--group", "gpu-plain"]
    assert call(main, [*cells, "--evidence", "autograd,kernels", "--times", "ns"]) == status
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "2 of 2 right",
        f"not recorded: plain_r_in_n, any, autograd: RuntimeError: {reason}",
    ]


def test_a_trace_without_its_operators_keeps_the_rest(tmp_path: Path) -> None:
    kernels = recorded(Layout(4, each_layer(4, 2)))
    last = max(event["ts"] + event["dur"] for event in kernels)
    shown = document(thread(checkpointed_step(99)))["traceEvents"]
    events = kernels + [{**event, "ts": event["ts"] + last + 9} for event in shown]
    trace = tmp_path / "plain_r_in_n.flash.json.gz"
    trace.write_bytes(gzip.compress(as_bytes({"traceEvents": events})))
    assert analyse([trace]).evidence_level == "autograd"
    result = analyse([without_operators(trace, tmp_path / "alone.json.gz")])
    assert (result.verdict, result.evidence_level) == ("doubled", "kernels")
