"""A block that goes one way without gradients and another with them: which of its runs goes which
way after a change, against the changed model itself.

The block is one operator, which sleeps longer with gradients, so that little else is in a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recompute_scan.cost.autograd import TYPICAL, scale
from recompute_scan.cost.simulate import Base, predict, prepare
from tests.cost.test_early_stop import recorded

BLOCKS = 2
# Long beside what a busy machine adds to a sleep.
SHORT_S, LONG_S = 0.01, 0.05
NO_HOOKS = scale(TYPICAL, 0.0)

_operators = torch.library.Library("two_ways", "DEF")
_operators.define("layer(Tensor x) -> Tensor")
slept: list[float] = []


def _layer(x: Tensor) -> Tensor:
    slept.append(LONG_S if torch.is_grad_enabled() else SHORT_S)
    time.sleep(slept[-1])
    return (x * x).sin() if torch.is_grad_enabled() else x.sin()


_operators.impl("layer", _layer, "CompositeImplicitAutograd")


def checkpointed(variants: str, x: Tensor) -> Tensor:
    """The block under these checkpoints, the outermost first: R is reentrant, N is not."""
    if not variants:
        result: Tensor = torch.ops.two_ways.layer(x.exp()).cos()
        return result
    inside = lambda x: checkpointed(variants[1:], x)  # noqa: E731
    return torch.as_tensor(checkpoint(inside, x, use_reentrant=variants[0] == "R"))


def training(variants: str) -> Callable[[], None]:
    def step() -> None:
        x = torch.rand(4, 4, requires_grad=True)
        for _ in range(BLOCKS):
            x = checkpointed(variants, x)
        x.sum().backward()

    return step


def sleeps(variants: str) -> float:
    """Seconds that a step sleeps under these checkpoints."""
    step = training(variants)
    step()
    slept.clear()
    step()
    return sum(slept)


@cache
def base(variants: str, folder: Path) -> Base:
    found = prepare(recorded(training(variants), folder / f"{variants}.json"), np.zeros(0))
    assert found is not None
    return found


@pytest.mark.parametrize("variants", ["RR", "RN", "NR"])
@pytest.mark.parametrize("kept", [0, 1, None])
def test_each_run_that_is_left_goes_the_way_of_its_mode(
    variants: str, kept: int | None, tmp_path: Path
) -> None:
    keep = None if kept is None else lambda checkpoints: checkpoints[kept]
    steps = base(variants, tmp_path)
    saved = (1 - predict(steps, keep, NO_HOOKS).share) * float(np.median(steps.steps)) / 1e9
    after = "" if kept is None else variants[kept]
    assert saved == pytest.approx(sleeps(variants) - sleeps(after), abs=0.15 * BLOCKS * LONG_S)
