"""The tracker of a real Accelerator, on the CPU."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.checkpoint import checkpoint

from recompute_scan.integrations import RecomputeScanTracker
from tests.callbacks.counted import Counter
from tests.record.residue import left_behind

# What the frameworks warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

PLAN: dict[str, Any] = {"steps": 1, "warmup": 2, "timing_steps": 0}


def run(layer: nn.Module, x: Any, checkpoints: int) -> Any:
    if not checkpoints:
        return layer(x)
    return checkpoint(run, layer, x, checkpoints - 1, use_reentrant=True)


@pytest.mark.parametrize(
    ("checkpoints", "verdict", "numbered"), [(2, "doubled", True), (1, "full", False)]
)
def test_a_loop_is_recorded(checkpoints: int, verdict: str, numbered: bool) -> None:
    tracker = RecomputeScanTracker(**PLAN)
    accelerator = Accelerator(cpu=True, log_with=[tracker])
    accelerator.init_trackers("any", config={"lr": 0.1})
    layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
    counters = [Counter(layer) for layer in layers]
    model, optimizer = accelerator.prepare(layers, torch.optim.SGD(layers.parameters(), 0.1))
    for step in range(6):
        x: Any = torch.ones(2, 8, requires_grad=True)
        for layer in model:
            x = run(layer, x, checkpoints)
        loss = x.square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=step if numbered else None)
        if numbered:  # the same step once more
            accelerator.log({"rate": 0.1}, step=step)
    accelerator.end_training()
    assert {counter.recomputes for counter in counters} == {checkpoints}
    assert accelerator.get_tracker("recompute_scan", unwrap=True).scan is tracker.scan
    assert tracker.scan.verdict == verdict
    assert tracker.scan.regions["recompute_runs_per_backward"].tolist() == [checkpoints] * 3
    assert [step.micro_batches for step in tracker.scan.result.steps if step.complete] == [1]
    assert left_behind() == set()
