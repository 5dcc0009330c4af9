"""Recordings by ``trace_only``, which torch 2.13 has: written without what Python could ask of it.

There are no stacks in them (pytorch#184306); names, numbers and shapes are there.
"""

from pathlib import Path

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

from recompute_scan.analysis.pipeline import analyse
from tests.cases.export import export
from tests.cases.model import Oracle
from tests.cases.nesting import CASES

pytestmark = pytest.mark.skipif(
    not hasattr(_ExperimentalConfig(), "trace_only"), reason="torch has no such recordings yet"
)


@pytest.mark.parametrize(
    ("name", "runs"), [("no_checkpoint", 0), ("n_outside", 1), ("r_in_n", 2), ("n_in_r", 2)]
)
def test_the_answer_is_that_of_any_recording(tmp_path: Path, name: str, runs: int) -> None:
    (case,) = (case for case in CASES if case.name == name)
    path = tmp_path / "trace.json"
    step = case.build(Oracle(), torch.device("cpu"))
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda recorded: export(recorded, path),
        record_shapes=True,
        experimental_config=_ExperimentalConfig(trace_only=True),
    ) as profiler:
        for _ in range(4):
            step()
            profiler.step()
    result = analyse([path])
    assert (result.verdict, result.recompute_per_backward) == (case.verdict, runs)
    assert result.confidence == "high"
