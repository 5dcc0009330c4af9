"""A recorded script beside the same one with checkpoints gone: what is predicted from the first
must be the step time of the second.

Every run of a layer sleeps, so that the machine's other work is a small part of a step.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from recompute_scan.analysis.pipeline import analyse
from tests.record.runs import LAYERS, record_script

pytestmark = pytest.mark.slow

SCRIPT = (
    LAYERS
    + """\
import time

class Slow(Layer):
    def forward(self, x):
        time.sleep(0.03)
        return super().forward(x)

def reentrant(layer, x):
    return checkpoint(layer, x, use_reentrant=True)

def wrapped(layer, x):
    return checkpoint(layer, x, use_reentrant=False)

def doubled(layer, x):
    return checkpoint(functools.partial(reentrant, layer), x, use_reentrant=False)

def plain(layer, x):
    return layer(x)

layers = nn.ModuleList(Slow() for _ in range(3))
optimizer = torch.optim.SGD(layers.parameters(), 0.1)
for step in range(99):
    x = torch.randn(4, 8, requires_grad=True)
    for layer in layers:
        x = CHOSEN(layer, x)
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)


def step_ms(folder: Path, chosen: str) -> float:
    done = record_script(folder, SCRIPT.replace("CHOSEN", chosen), timing_steps=6)
    assert done.status == 0, done.stderr
    return median(done.info.timed_steps_ms)


@pytest.mark.parametrize("before", ["doubled", "wrapped", "reentrant"])
def test_all_recomputes_removed_is_the_script_without_checkpoints(
    tmp_path: Path, before: str
) -> None:
    now = step_ms(tmp_path / "before", before)
    truth = step_ms(tmp_path / "plain", "plain")
    cost = analyse([tmp_path / "before" / "out"]).cost
    assert cost is not None
    assert cost.bare_step_ms is not None
    assert truth < 0.7 * now
    assert cost.bare_step_ms == pytest.approx(truth, rel=0.08)


def test_the_redundant_removed_is_the_repaired_script(tmp_path: Path) -> None:
    now = step_ms(tmp_path / "before", "doubled")
    truth = step_ms(tmp_path / "repaired", "wrapped")
    cost = analyse([tmp_path / "before" / "out"]).cost
    assert cost is not None
    assert truth < 0.8 * now
    assert cost.predicted_step_ms == pytest.approx(truth, rel=0.08)
