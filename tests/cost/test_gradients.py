"""A block that goes one way without gradients and another with them: which of its runs goes which
way after a change, against the changed model itself.

The block is one operator, which takes longer with gradients. The trace gets its times from a clock
that counts: so much for each run of the operator, by what it ran inside, and a microsecond between
two beginnings or ends of calls. So no other load on the machine shows in them.
"""

import bisect
import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recompute_scan.cost.reruns import TYPICAL
from recompute_scan.cost.simulate import Base, predict, prepare
from recompute_scan.recompute.study import study
from recompute_scan.trace import load
from tests.cost.test_early_stop import recorded

BLOCKS = 2
SHORT_US, LONG_US = 10_000, 50_000
NO_HOOKS = TYPICAL.scaled(0.0)

_operators = torch.library.Library("two_ways", "DEF")
_operators.define("layer(Tensor x) -> Tensor")
took: list[int] = []


def _layer(x: Tensor) -> Tensor:
    took.append(LONG_US if torch.is_grad_enabled() else SHORT_US)
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


def layers_us(variants: str) -> int:
    """Time of all runs of the operator in a step under these checkpoints."""
    step = training(variants)
    step()
    took.clear()
    step()
    return sum(took)


def put_on_the_clock(trace: Path) -> None:
    """Give the calls of a trace the times of the clock that counts."""
    document = json.loads(trace.read_bytes())
    calls = [event for event in document["traceEvents"] if event["ph"] == "X"]
    spans = [(round(1000 * e["ts"]), round(1000 * (e["ts"] + e["dur"]))) for e in calls]
    squares = [
        begin for (begin, _), e in zip(spans, calls, strict=True) if e["name"] == "aten::mul"
    ]
    cuts = sorted(set(itertools.chain.from_iterable(spans)))
    passes = dict.fromkeys(cuts, 1)
    for (begin, end), call in zip(spans, calls, strict=True):
        if call["name"] == "two_ways::layer":
            with_gradients = any(begin <= square < end for square in squares)
            passes[begin] += LONG_US if with_gradients else SHORT_US
    clock = [0, *itertools.accumulate(passes[cut] for cut in cuts)]
    for (begin, end), call in zip(spans, calls, strict=True):
        first, last = (clock[bisect.bisect_left(cuts, time)] for time in (begin, end))
        call |= {"ts": first, "dur": last - first}
    kept = [event for event in document["traceEvents"] if event["ph"] in "MX"]
    trace.write_text(json.dumps(document | {"traceEvents": kept}))


@cache
def base(variants: str, folder: Path) -> Base:
    trace = folder / f"{variants}.json"
    recorded(training(variants), trace)
    put_on_the_clock(trace)
    found = prepare(study(load(trace)), np.zeros(0))
    assert found is not None
    return found


@pytest.mark.parametrize("variants", ["RR", "RN", "NR"])
@pytest.mark.parametrize("kept", [0, 1, None])
def test_each_run_that_is_left_goes_the_way_of_its_mode(
    variants: str, kept: int | None, tmp_path: Path
) -> None:
    keep = None if kept is None else lambda checkpoints: checkpoints[kept]
    steps = base(variants, tmp_path)
    saved = (1 - predict(steps, keep, NO_HOOKS).share) * float(np.median(steps.steps)) / 1e3
    after = "" if kept is None else variants[kept]
    assert saved == pytest.approx(layers_us(variants) - layers_us(after), abs=0.1 * SHORT_US)
