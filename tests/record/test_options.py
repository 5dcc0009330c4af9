"""What the annotations say of a checkpoint's surroundings, asked of modules as torch makes them."""

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from recompute_scan.record.origins import (
    COMPILER_MODULE,
    Arguments,
    counts_runs,
    generator_function,
)


def scripted(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of torch advise against it
        made: nn.Module = torch.jit.script(module)
    return made


NORMS: dict[str, Callable[[], nn.Module]] = {
    "its own": lambda: nn.BatchNorm1d(4),
    "inside": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "scripted": lambda: scripted(nn.BatchNorm1d(4)),
    "scripted, inside": lambda: nn.Sequential(scripted(nn.Sequential(nn.BatchNorm1d(4)))),
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "none": lambda: nn.Linear(4, 4),
    "switched off": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "scripted, none": lambda: scripted(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))),
    "frozen": lambda: nn.BatchNorm1d(4).eval(),
    "scripted, frozen": lambda: scripted(nn.BatchNorm1d(4).eval()),
}


@pytest.mark.parametrize("name", [*NORMS, *OTHERS])
def test_what_counts_its_runs_is_seen(name: str) -> None:
    module = (NORMS | OTHERS)[name]()
    assert counts_runs([nn.ReLU(), module]) is (name in NORMS)
    before = [value.clone() for value in module.buffers()]
    module(torch.randn(3, 4))
    same = [torch.equal(a, b) for a, b in zip(before, module.buffers(), strict=True)]
    assert all(same) is (name in OTHERS)


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((), {}, []),
        ((True,), {"determinism_check": "default"}, []),
        ((), {"determinism_check": "none"}, ["determinism-check-off"]),
        ((False,), {}, ["random-state-not-kept"]),
        ((), {"preserve_rng_state": False}, ["random-state-not-kept"]),
    ],
)
def test_what_a_call_switches_off_is_noted(
    args: tuple[object, ...], kwargs: dict[str, object], said: list[str]
) -> None:
    generator = generator_function()
    assert generator is not None
    interpreted = torch.fx.Interpreter(torch.fx.symbolic_trace(nn.ReLU())).run
    for function in (len, interpreted):
        assert Arguments(generator).options((function, *args), kwargs) == said
    ask = partial(Arguments(generator).options, (interpreted, *args), kwargs)
    assert eval("ask()", {"__name__": COMPILER_MODULE, "ask": ask}) == []  # the compiler's
