"""Blocks are named after the modules whose frames hold them."""

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.recompute.regions import list_regions
from recompute_scan.recompute.study import RecomputeFacts
from tests.cases.loops import train
from tests.cases.model import Checkpoints, Oracle, Variant
from tests.recompute.training import gradients, marked_step, run
from tests.trace_builder import Call, optimizer, step, studied, thread


def frame(name: str, *inside: Call) -> Call:
    return Call(f"nn.Module: {name}", "python_function", inside)


def layers(*frames: str) -> RecomputeFacts:
    """Two layers, each checkpointed once, in frames: the model's, then one or two a layer."""
    passes = [run(0), run(10)]
    inner = [frame(frames[1 + number], *calls) for number, calls in enumerate(passes)]
    backward = [node for number in (1, 0) for node in gradients(passes[number], run(50 + number))]
    forward = frame(frames[0], *inner)
    return studied(thread(step(0, forward, *backward, optimizer())))


def names(facts: RecomputeFacts) -> list[tuple[str | None, str | None]]:
    return [(region.module, region.module_class) for region in list_regions(facts)]


def test_a_module_that_holds_several_blocks_names_none() -> None:
    passes = [run(0), run(10)]
    backward = [node for number in (1, 0) for node in gradients(passes[number], run(50 + number))]
    whole = frame("Model_0", *passes[0], *passes[1])
    facts = studied(thread(step(0, whole, *backward, optimizer())))
    assert names(facts) == [(None, None), (None, None)]


def test_marks_name_better_than_frames() -> None:
    facts = studied(thread(frame("Trainer_0", marked_step(0, recomputes=1))))
    assert names(facts) == [(f"layers.{number}", "Layer") for number in range(3)]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("inner", ["reentrant", "non-reentrant", None])
def test_a_recording_with_stacks(tmp_path: Path, inner: Variant | None) -> None:
    trace = tmp_path / "trace.json"
    do_step = train(Checkpoints(outer="reentrant", inner=inner))(Oracle(), torch.device("cpu"))
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=2),
        with_stack=True,
        on_trace_ready=lambda recorded: recorded.export_chrome_trace(str(trace)),
    ) as profiler:
        for _ in range(4):
            do_step()
            profiler.step()
    result = analyse([trace])
    assert [region.module for region in result.regions] == [f"Layer_{i}" for i in range(4)]
    assert {region.module_class for region in result.regions} == {"Layer"}
    runs = {region.recompute_runs_per_backward for region in result.regions}
    assert runs == {1.0 if inner is None else 2.0}
