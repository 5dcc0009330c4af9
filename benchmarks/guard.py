"""What the guard costs, what it finds, and what it tells of healthy trainings: ``make guard``.

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
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.guard.healthy import HEALTHY
from tests.guard.healthy_elsewhere import HEALTHY_ELSEWHERE
from tests.guard.nets import Net, train_step
from tests.guard.regressions import REGRESSIONS

import recompute_scan
from recompute_scan.record.compat import generator_name

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
    """Forward and backward pass of so many layers, without checkpoints where the variant is
    ``None``, and the optimizer that ends the step.
    """
    torch.manual_seed(0)
    model = nn.ModuleList(_Layer(width) for _ in range(layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def passes() -> None:
        optimizer.zero_grad()
        x = torch.randn(rows, width, requires_grad=True)
        for layer in model:
            x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
        x.square().mean().backward()  # type: ignore[no-untyped-call]

    return passes, optimizer


def spent(passes: Callable[[], None], optimizer: torch.optim.Optimizer) -> float:
    """CPU time of a step in µs, of all threads."""
    began = time.process_time_ns()
    passes()
    optimizer.step()
    return (time.process_time_ns() - began) / 1e3


def added_per_call(pairs: int, *, reentrant: bool) -> float:
    """What the guard adds to a checkpointed call, its recompute and backward pass included, in µs.

    Each pair is one call of nothing with what the guard has put in, and one with what was there
    before, in turn first and second. The median of their differences is hardly moved by what else
    a machine does.
    """
    owner: object = torch_checkpoint.CheckpointFunction if reentrant else torch_checkpoint
    name = "forward" if reentrant else generator_name()
    assert name is not None
    layer, x = nn.Identity(), torch.ones(1, requires_grad=True)
    differences = []
    before = vars(owner)[name]
    with recompute_scan.guard(sample_every=0):
        ours = vars(owner)[name]
        assert ours is not before
        for number in range(pairs):
            took = {}
            for guarded in (number % 2 == 0, number % 2 == 1):
                setattr(owner, name, ours if guarded else before)
                began = time.thread_time_ns()
                checkpoint(layer, x, use_reentrant=reentrant).backward()
                took[guarded] = time.thread_time_ns() - began
            differences.append((took[True] - took[False]) / 1e3)
        setattr(owner, name, ours)
    return float(statistics.median(differences))


def added_per_step(steps: int, layers: int, *, made_before: bool = True) -> float:
    """What the guard adds to the end of a step with so many checkpointed layers, in µs.

    Timed is all of an optimizer's step but what is between torch's own first hooks in it, with the
    guard and without. The training step does enough else to push what the guard needs out of the
    processor's caches.

    Args:
        steps: How many, with the guard and without.
        layers: Checkpointed ones; 0 for a model without checkpoints.
        made_before: Whether the optimizer was there when the guard began.
    """

    def around(guard: AbstractContextManager[object]) -> list[float]:
        took: list[float] = []
        at: list[int] = []
        passes, optimizer = steps_of(layers or 12, 64, 256, reentrant=False if layers else None)

        def note(*_: object) -> None:
            at.append(time.perf_counter_ns())

        hooks = [register_optimizer_step_pre_hook(note), register_optimizer_step_post_hook(note)]
        with guard:
            if not made_before:
                kind = type("Late", (type(optimizer),), {})
                optimizer = kind(optimizer.param_groups[0]["params"], lr=1e-3)
            for _ in range(10):
                passes()
                began = time.perf_counter_ns()
                optimizer.step()
                took.append((at[0] - began + time.perf_counter_ns() - at[-1]) / 1e3)
                at.clear()
        for hook in hooks:
            hook.remove()
        return took[5:]

    with_it: list[float] = []
    without: list[float] = []
    for _ in range(steps // 5):
        with_it += around(recompute_scan.guard(sample_every=0, learning=3))
        without += around(nullcontext())
    return statistics.median(with_it) - statistics.median(without)


def added_by_comparing(
    passes: Callable[[], None], optimizer: torch.optim.Optimizer
) -> tuple[float, float]:
    """What comparing one call with its recompute adds to its step, and what others take, in µs."""
    compared: list[float] = []
    others: list[float] = []
    with recompute_scan.guard(sample_every=2, sample_share=None, learning=2):
        for number in range(24):
            (compared if number >= 6 and number % 3 == 0 else others).append(
                spent(passes, optimizer)
            )
    usual = statistics.median(others)
    return max(0.0, statistics.median(compared) - usual), usual


# Layers, their width, rows of a batch (sequences times tokens), and what has such a size.
_MODELS = (
    (6, 384, 2048, "nanoGPT on Shakespeare, 8 sequences"),
    (12, 768, 1024, "GPT-2, one sequence"),
)


def costs(pairs: int) -> None:
    """CPU time that the guard takes of steps, counting and idle."""
    calls = [added_per_call(pairs, reentrant=one) for one in (False, True)]
    print(
        f"a checkpointed call and its recompute: {calls[0]:.1f} µs non-reentrant,"
        f" {calls[1]:.1f} µs reentrant"
    )
    steps = pairs // 30
    idle, late = (added_per_step(steps, 0, made_before=one) for one in (True, False))
    print(
        f"the end of a step in which nothing is checkpointed: {idle:.0f} µs, with an optimizer"
        f" made under the guard {late:.0f} µs"
    )
    for layers, width, rows, what in _MODELS:
        end = added_per_step(steps, layers)
        step = steps_of(layers, width, rows, reentrant=False)
        whole = min(spent(*step) for _ in range(2))
        counting = layers * calls[0] + end
        print(
            f"{what}: a step of {whole / 1e3:.0f} ms; counting {counting:.0f} µs"
            f" ({100 * counting / whole:.4f} %), its end {end:.0f} µs of that;"
            f" idle {100 * idle / whole:.4f} %; counting is 0.1 % of steps of {counting:.0f} ms"
        )
    more, usual = added_by_comparing(*steps_of(6, 384, 512, reentrant=False))
    distance = max(100, more / (0.0005 * usual))
    print(
        f"comparing one call of a step of {usual / 1e3:.0f} ms: {more / 1e3:.1f} ms, hence every"
        f" {distance:.0f} steps ({100 * more / usual / distance:.4f} %)"
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
    for training in (*HEALTHY, *HEALTHY_ELSEWHERE):
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
    parser.add_argument("--pairs", type=int, default=3000)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("recompute_scan.guard").setLevel(logging.CRITICAL)
    costs(options.pairs)
    equal = equal_losses()
    right = regressions()
    print(f"{right} of {len(REGRESSIONS)} injected regressions found with region and step")
    alarms = healthy(options.steps)
    print(
        f"{alarms} alarms in {len((*HEALTHY, *HEALTHY_ELSEWHERE))} healthy trainings of"
        f" {options.steps} steps"
    )
    return 0 if equal and right == len(REGRESSIONS) and not alarms else 1


if __name__ == "__main__":
    sys.exit(main())
