"""What the guard costs a training: CPU time of one process, with and without it by turns.

That it finds injected regressions, tells nothing of healthy trainings and changes no loss is what
``tests/guard`` checks; ``--healthy`` runs these trainings for longer, and is 1 where one alarms.
"""

import logging
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import click
import torch
from tests.guard.healthy import HEALTHY
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

import recompute_scan
from benchmarks._frame import benchmark
from benchmarks._machine import machine
from recompute_scan.record.torch_versions import generator_name


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


def healthy(steps: int) -> int:
    """How many alarms there were in trainings in which nothing is wrong."""
    alarms = 0
    for training in HEALTHY:
        torch.manual_seed(0)
        with recompute_scan.guard() as guard:
            training(steps)
        alarms += len(guard.changes)
        assert training.__doc__ is not None
        told = "; ".join(one.text for one in guard.changes) or "no alarm"
        print(f"{training.__name__:<14} {guard.steps:>5} steps  {told}")
    return alarms


@benchmark
@click.option(
    "--pairs", type=click.IntRange(min=150), default=3000, help="Calls with the guard and without."
)
@click.option("--healthy", "steps", default=0, help="Steps of each healthy training.")
def main(pairs: int, steps: int) -> int:
    warnings.simplefilter("ignore")
    logging.getLogger("recompute_scan.guard").setLevel(logging.CRITICAL)
    print(machine("recompute-scan", "torch"))
    costs(pairs)
    alarms = healthy(steps) if steps else 0
    if steps:
        number = len(HEALTHY)
        print(f"{alarms} alarms in {number} healthy trainings of {steps} steps")
    return int(alarms > 0)
