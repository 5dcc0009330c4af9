"""A recorded script beside the same one with checkpoints gone: what is predicted from the first
must be the step time of the second.

Every run of a layer sleeps, so that the machine's other work is a small part of a step.
"""

from pathlib import Path
from statistics import median

import pytest

from recompute_scan.analysis.pipeline import analyse
from tests.record.runs import LAYERS, record_script

pytestmark = pytest.mark.slow

NEAR = 0.08

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


def predicted_and_measured(
    folder: Path, before: str, after: str, predicted: str, most: float
) -> float:
    """How far the prediction is from the measured step, as a share of it; the nearest of three.

    The measured one is less than ``most`` of the step before, or there is nothing to predict.
    What else the machine does meets one of the two recordings more than the other.
    """
    off: list[float] = []
    for attempt in range(3):
        now = step_ms(folder / f"{attempt}-before", before)
        truth = step_ms(folder / f"{attempt}-after", after)
        cost = analyse([folder / f"{attempt}-before" / "out"]).cost
        assert cost is not None
        assert truth < most * now
        off.append(abs(getattr(cost, predicted) / truth - 1))
        if off[-1] < NEAR:
            break
    return min(off)


@pytest.mark.parametrize("before", ["doubled", "wrapped", "reentrant"])
def test_all_recomputes_removed_is_the_script_without_checkpoints(
    tmp_path: Path, before: str
) -> None:
    assert predicted_and_measured(tmp_path, before, "plain", "bare_step_ms", 0.7) < NEAR


def test_the_redundant_removed_is_the_repaired_script(tmp_path: Path) -> None:
    assert predicted_and_measured(tmp_path, "doubled", "wrapped", "predicted_step_ms", 0.8) < NEAR
