"""What the guard costs, what it finds, and what it tells of healthy trainings: `make guard`.

Costs are CPU times of one process, with and without the guard by turns.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
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


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return x + down


def steps_of(
    layers: int, width: int, rows: int, reentrant: bool | None
) -> tuple[Callable[[], None], torch.optim.Optimizer]:
    """A training step of so many layers; without checkpoints where the variant is ``None``."""
    torch.manual_seed(0)
    model = nn.ModuleList(_Layer(width) for _ in range(layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        x = torch.randn(rows, width, requires_grad=True)
        for layer in model:
            x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
        x.square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step, optimizer


def spent(step: Callable[[], None]) -> float:
    """CPU time of a step in µs, of all threads."""
    began = time.process_time_ns()
    step()
    return (time.process_time_ns() - began) / 1e3


def added(layers: int, rounds: int, reentrant: bool | None) -> float:
    """What the guard adds to a step in µs.

    Its work is that of the calls and hangs on no width, so it is measured where little else
    happens: steps of layers one wide, some with and some without it by turns. Each round is short,
    and has the least of its steps; the median of the rounds' differences is hardly moved by what
    else a machine does.
    """
    step, _ = steps_of(layers, 1, 1, reentrant)
    for _ in range(5):
        step()
    differences = []
    guard = recompute_scan.guard(sample_every=0, learning=2)
    for _ in range(rounds):
        without = min(spent(step) for _ in range(8))
        with guard:
            for _ in range(5):  # until it has learned what is usual
                step()
            guarded = min(spent(step) for _ in range(8))
        differences.append(guarded - without)
    return statistics.median(differences)


def added_by_comparing(step: Callable[[], None]) -> float:
    """What the comparison of one call with its recompute adds to its step, in µs."""
    compared, others = [], []
    with recompute_scan.guard(sample_every=2, sample_share=None, learning=2):
        for number in range(24):
            (compared if number >= 6 and number % 3 == 0 else others).append(spent(step))
    return statistics.median(sorted(compared)) - min(others)


# Layers, their width, rows of a batch (sequences times tokens), and what has such a size.
_MODELS = (
    (6, 384, 2048, "nanoGPT on Shakespeare, 8 sequences"),
    (12, 768, 1024, "GPT-2, one sequence"),
    (24, 1024, 1024, "GPT-2 medium, one sequence"),
)


def costs(rounds: int) -> None:
    """CPU time that the guard takes of steps, counting and idle."""
    for reentrant in (False, True):
        few, many = added(8, rounds, reentrant), added(24, rounds, reentrant)
        call = (many - few) / 16
        print(
            f"{'reentrant' if reentrant else 'non-reentrant':<14} {call:5.1f} µs per checkpointed"
            f" call, its recompute included, and {few - 8 * call:5.1f} µs per step"
        )
    for layers, width, rows, what in _MODELS:
        step, _ = steps_of(layers, width, rows, False)
        whole = min(spent(step) for _ in range(3))
        counting, idle = added(layers, rounds, False), added(layers, rounds, None)
        print(
            f"{what}: a step of {whole / 1e3:.0f} ms; counting {counting:.0f} µs"
            f" ({100 * counting / whole:.4f} %), idle {idle:.0f} µs ({100 * idle / whole:.4f} %);"
            f" counting is 0.1 % of steps of {counting:.0f} ms"
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
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("recompute_scan.guard").setLevel(logging.CRITICAL)
    costs(options.rounds)
    equal = equal_losses()
    right = regressions()
    print(f"{right} of {len(REGRESSIONS)} injected regressions found with region and step")
    alarms = healthy(options.steps)
    print(f"{alarms} alarms in {len(HEALTHY)} healthy trainings of {options.steps} steps")
    return 0 if equal and right == len(REGRESSIONS) and not alarms else 1


if __name__ == "__main__":
    sys.exit(main())
