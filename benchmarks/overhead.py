"""What recording costs the steps that are not recorded: before the first, while steps are timed,
and after the last one.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --width 32 --rounds 60

One process, one model, blocks of steps in turn: without us, then ``recompute_scan.record()`` in
its warm-up, in its timed steps and after its last step, without us again, then the same under what
``recompute-scan run`` installs. Each block is compared with those without us round it; the table
has medians over the rounds with 95 % intervals (bootstrap), and a row of blocks without us compared
in the same way, which says what the method can tell. The first steps of each block are left out.
Everything runs in one thread, so that the time of the processor holds all that is done; by the
clock, other work on the machine is in it too.

The model is the worst case: every block of it is checkpointed as a whole (reentrant) and in two
halves (non-reentrant), three checkpoint calls a block and more in the replays.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import recompute_scan
from recompute_scan.record.execute import Outcome
from recompute_scan.record.observe import RunOptions, observe

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import processor, versions

WITHOUT = "without us"
# Steps at the beginning of a block that still feel what was before it.
SETTLE = 2
_RESAMPLES = 2000


class Half(nn.Module):
    """One half of a block: a norm and a product, twice as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return out


class Block(nn.Module):
    """Two halves, checkpointed each, and together once more."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = Half(width), Half(width)

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = torch.utils.checkpoint.checkpoint(self.both, x, use_reentrant=True)
        return whole

    def both(self, x: Tensor) -> Tensor:
        x = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False)
        again: Tensor = torch.utils.checkpoint.checkpoint(self.second, x, use_reentrant=False)
        return again


@dataclass(frozen=True)
class Step:
    """What a step takes: ms by the clock, and ms of the processor in the one thread there is."""

    clock_ms: float
    processor_ms: float


class Training:
    """A model, its data, and the times of its steps."""

    def __init__(self, width: int, blocks: int, rows: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.data = torch.randn(rows, width, requires_grad=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def anew(self) -> None:
        """Another optimizer, as a script makes it while it is recorded."""
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        """One ordinary step."""
        self.model(self.data).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def block(self, steps: int, ended: Callable[[], None] = lambda: None) -> Step:
        """The median step of so many; ``ended`` is what the loop calls behind each."""
        clock, processor = [], []
        for _ in range(SETTLE + steps):
            began, used = time.perf_counter(), time.thread_time()
            self.step()
            ended()
            processor.append(1e3 * (time.thread_time() - used))
            clock.append(1e3 * (time.perf_counter() - began))
        return Step(statistics.median(clock[SETTLE:]), statistics.median(processor[SETTLE:]))


@dataclass
class Rounds:
    """Each round's step as a multiple of the step without us, by mode; and those steps."""

    clock: dict[str, list[float]] = field(default_factory=dict)
    processor: dict[str, list[float]] = field(default_factory=dict)
    plain: list[Step] = field(default_factory=list)

    def add(self, before: Step, modes: dict[str, Step], after: Step) -> None:
        """One group of blocks with the blocks without us round it."""
        self.plain += [before, after]
        clock = (before.clock_ms + after.clock_ms) / 2
        processor = (before.processor_ms + after.processor_ms) / 2
        for mode, step in modes.items():
            self.clock.setdefault(mode, []).append(step.clock_ms / clock)
            self.processor.setdefault(mode, []).append(step.processor_ms / processor)


def measure(training: Training, rounds: int, steps: int) -> Rounds:
    """All blocks, in turn."""
    found = Rounds()
    before = training.block(steps)
    for _ in range(rounds):
        plain = training.block(steps)
        after = training.block(steps)
        found.add(before, {WITHOUT: plain}, after)
        modes = recorded(training, steps)
        before, after = after, training.block(steps)
        found.add(before, modes, after)
        modes = under_run(training, steps)
        before, after = after, training.block(steps)
        found.add(before, modes, after)
        before = after
    return found


def recorded(training: Training, steps: int) -> dict[str, Step]:
    """The blocks of one ``record()``."""
    several = SETTLE + steps
    training.anew()
    modes = {}
    with recompute_scan.record(1, warmup=several, timing_steps=several) as recording:
        modes["record(), before"] = training.block(steps, recording.step)
        modes["record(), timed"] = training.block(steps, recording.step)
        while not recording.done:
            training.step()
            recording.step()
        modes["record(), after"] = training.block(steps, recording.step)
    return modes


def under_run(training: Training, steps: int) -> dict[str, Step]:
    """The blocks of what ``run`` does in a process."""
    several = SETTLE + steps
    modes = {}

    def program(_: object) -> Outcome:
        training.anew()
        modes["run, before"] = training.block(steps)
        modes["run, timed"] = training.block(steps)
        for _ in ("the profiler's own", "profiled", "with stacks"):
            training.step()
        modes["run --keep-going, after"] = training.block(steps)
        return Outcome("finished", 0)

    with tempfile.TemporaryDirectory() as folder:
        options = RunOptions(
            target="overhead.py",
            is_module=False,
            args=(),
            output=Path(folder),
            steps=1,
            warmup=several,
            timing_steps=several,
            keep_going=True,
        )
        info = observe(options, Path(folder), program)
    if info.status != "complete":
        raise SystemExit(f"the recording is not complete: {info.message}")
    return modes


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies, with 95 % (percentiles of resampled medians)."""
    random.seed(0)
    medians = sorted(
        statistics.median(random.choices(values, k=len(values))) for _ in range(_RESAMPLES)
    )
    return medians[_RESAMPLES // 40], medians[-_RESAMPLES // 40 - 1]


def report(found: Rounds) -> str:
    """The table."""
    clock = statistics.median(step.clock_ms for step in found.plain)
    processor = statistics.median(step.processor_ms for step in found.plain)
    lines = [
        f"A step without us: {processor:.2f} ms of the processor, {clock:.2f} ms by the clock "
        f"(median of {len(found.plain)} blocks).",
        "",
        "| steps | processor | 95 % interval | us a step | clock | 95 % interval |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for mode, ratios in found.processor.items():
        us = 1e3 * processor * (statistics.median(ratios) - 1)
        lines.append(f"| {mode} | {_row(ratios)} | {us:+.0f} | {_row(found.clock[mode])} |")
    return "\n".join(lines)


def _row(ratios: Sequence[float]) -> str:
    low, high = interval(ratios)
    middle = statistics.median(ratios)
    return f"{100 * (middle - 1):+.2f} % | {100 * (low - 1):+.2f} to {100 * (high - 1):+.2f} %"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=6, help="measured steps of a block")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    training = Training(asked.width, asked.blocks, asked.rows)
    print(f"{processor()}; {versions(['recompute-scan', 'torch'])}; one thread")
    print(
        f"{asked.blocks} blocks of 3 checkpoints, width {asked.width}, {asked.rows} rows; "
        f"{asked.rounds} rounds of blocks of {asked.steps} steps"
    )
    print(report(measure(training, asked.rounds, asked.steps)))


if __name__ == "__main__":
    main()
