"""Faults in every function of the guard that runs while a script trains: its losses stay.

The functions are found by what is entered. Left out are the doors, which hold nothing that can
fail, and what others call inside the guard's own shelter.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import recompute_scan
from recompute_scan import guarding
from tests.guard import nets
from tests.guard.nets import Net, train_step

OURS = str(Path(guarding.__file__).parent)
STEPS = 30


class Fault(Exception):
    """Nothing that our code expects."""


class Faults:
    """Makes one function of ours fail, or notes which are entered."""

    def __init__(self, target: str = "") -> None:
        self.entered: dict[str, None] = {}
        self.target = target
        self.hits = 0

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(OURS) or code.co_filename.endswith("doors.py"):
            return None
        name = f"{Path(code.co_filename).stem}:{code.co_firstlineno}:{code.co_name}"
        self.entered[name] = None
        if name != self.target:
            return None
        self.hits += 1
        raise Fault("injected")


def losses(faults: Faults | None) -> list[str]:
    torch.manual_seed(0)
    guard = recompute_scan.guard(learning=5, sample_every=2, sample_share=None)
    models = [Net(2), Net(2, reentrant=True)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in models]
    if faults is not None:
        guard.start()
        sys.settrace(faults.trace)
    found = []
    try:
        for number in range(STEPS):
            if number == STEPS // 2:
                models[0].how[0] = nets.plainly
            found += [train_step(*each) for each in zip(models, optimizers, strict=True)]
    finally:
        sys.settrace(None)
        guard.stop()
    return found


@pytest.mark.slow
def test_losses_stay_whatever_fails() -> None:
    plain = losses(None)
    look = Faults()
    assert losses(look) == plain
    assert len(look.entered) > 20
    # Said by the step hooks, and called by nobody else.
    for target in look.entered:
        if target.endswith(":boundary"):
            continue
        faults = Faults(target)
        assert losses(faults) == plain, target
        assert faults.hits, target
