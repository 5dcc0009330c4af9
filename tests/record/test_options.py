"""What the annotations say of a checkpoint's surroundings, asked of modules as torch makes them."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from recompute_scan.record.options import counts_runs


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


@pytest.mark.parametrize("name", NORMS)
def test_what_counts_its_runs_is_seen(name: str) -> None:
    module = NORMS[name]()
    assert counts_runs([nn.ReLU(), module])
    before = [value.clone() for value in module.buffers()]
    module(torch.randn(3, 4))
    assert any(not torch.equal(a, b) for a, b in zip(before, module.buffers(), strict=True))


@pytest.mark.parametrize("name", OTHERS)
def test_what_does_not_is_not(name: str) -> None:
    module = OTHERS[name]()
    assert not counts_runs([module])
    before = [value.clone() for value in module.buffers()]
    module(torch.randn(3, 4))
    assert all(torch.equal(a, b) for a, b in zip(before, module.buffers(), strict=True))
