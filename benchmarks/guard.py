"""What the guard costs, what it finds, and what it tells of healthy trainings: `make guard`.

Costs are least-of-several CPU times of one process, with and without the guard by turns.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.guard.healthy import HEALTHY
from tests.guard.nets import Net, train_step
from tests.guard.regressions import REGRESSIONS

import recompute_scan

_INJECTED = 40


def cost_per_call(rounds: int) -> None:
    """CPU time of one checkpointed call of nothing, forward and backward."""
    nothing, x = nn.Identity(), torch.ones(1, requires_grad=True)

    def measured(calls: int = 300) -> float:
        began = time.process_time()
        for _ in range(calls):
            checkpoint(nothing, x, use_reentrant=False).backward()
        return (time.process_time() - began) / calls * 1e6

    plain, counting = [], []
    for _ in range(rounds):
        plain.append(measured())
        with recompute_scan.guard(sample_every=0):
            counting.append(measured())
    print(
        f"one checkpointed call    {min(plain):8.1f} µs    with the guard {min(counting):8.1f} µs"
        f"    costs {min(counting) - min(plain):5.1f} µs"
    )


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return x + down


def cost_per_step(rounds: int, width: int, rows: int, *, checkpointed: bool) -> None:
    """CPU time of a step of eight layers, and what the guard adds to it."""
    torch.manual_seed(0)
    layers = nn.ModuleList(_Layer(width) for _ in range(8))
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)

    def step() -> None:
        x = torch.randn(rows, width)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        x.square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    def measured() -> float:
        began = time.process_time()
        step()
        return (time.process_time() - began) * 1e3

    plain, counting = [], []
    for _ in range(rounds):
        step()
        plain += [measured(), measured()]
        with recompute_scan.guard(sample_every=0):
            step()
            step()
            counting += [measured(), measured()]
    ratio = min(counting) / min(plain) - 1
    what = "counting" if checkpointed else "idle (nothing is checkpointed)"
    print(
        f"a step of {min(plain):7.1f} ms, {what}: {min(counting):7.1f} ms with the guard"
        f" ({100 * ratio:+.2f} %)"
    )


def equal_losses() -> bool:
    """Whether losses are the same to the last bit with the guard and without."""
    equal = True
    for reentrant in (False, True):
        losses = []
        for guarded in (False, True):
            torch.manual_seed(0)
            net = Net(reentrant=reentrant)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            guard = recompute_scan.guard(sample_every=3, sample_share=None)
            if guarded:
                guard.start()
            losses.append([train_step(net, optimizer) for _ in range(60)])
            guard.stop()
        equal &= losses[0] == losses[1]
    print(f"losses of 60 steps, both variants: {'equal to the bit' if equal else 'DIFFER'}")
    return equal


def regressions() -> int:
    """How many of the injected ones were told with the right region and step."""
    right = 0
    for one in REGRESSIONS:
        torch.manual_seed(0)
        net = Net(reentrant=one.reentrant)
        one.start(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with recompute_scan.guard(sample_every=2, sample_share=None) as guard:
            for number in range(1, 71):
                if number == _INJECTED:
                    one.inject(net)
                train_step(net, optimizer)
        first = guard.changes[0] if guard.changes else None
        latest = _INJECTED + (12 if "unfaithful" in one.kinds else 0)
        found = (
            first is not None
            and first.kind in one.kinds
            and one.module in first.modules
            and _INJECTED <= first.step <= latest
        )
        right += found
        said = f"{first.kind} in {first.modules[0]} since step {first.step}" if first else "nothing"
        print(f"{'found ' if found else 'MISSED'}  {one.name:<28} at step {_INJECTED}: {said}")
    return right


def healthy(steps: int) -> int:
    """How many alarms there were in trainings in which nothing is wrong."""
    alarms = 0
    for training in HEALTHY:
        torch.manual_seed(0)
        began = time.process_time()
        with recompute_scan.guard() as guard:
            training(steps)
        alarms += len(guard.changes)
        assert training.__doc__ is not None
        told = "; ".join(one.text for one in guard.changes) or "no alarm"
        spent = time.process_time() - began
        print(f"{training.__name__:<14} {guard.steps:>5} steps  {spent:6.1f} s CPU  {told}")
    return alarms


def main() -> int:
    """Status 0 where all is as it should be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rows", type=int, default=512)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("recompute_scan.guard").setLevel(logging.CRITICAL)
    cost_per_call(options.rounds)
    for checkpointed in (False, True):
        cost_per_step(options.rounds, options.width, options.rows, checkpointed=checkpointed)
    equal = equal_losses()
    right = regressions()
    print(f"{right} of {len(REGRESSIONS)} injected regressions found with region and step")
    alarms = healthy(options.steps)
    print(f"{alarms} alarms in {len(HEALTHY)} healthy trainings of {options.steps} steps")
    return 0 if equal and right == len(REGRESSIONS) and not alarms else 1


if __name__ == "__main__":
    sys.exit(main())
