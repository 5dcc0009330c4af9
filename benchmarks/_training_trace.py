"""Record a trace of about a wanted size: small training steps, as many as it takes.

    python benchmarks/training_trace.py TRACE.json --megabytes 300 --stacks

A transformer of eight blocks with a reentrant checkpoint around each block and non-reentrant ones
inside, trained by AdamW one parameter at a time: many short operators, deep nesting, few names,
as real traces have them. On the CPU, so without kernels.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

WIDTH, BLOCKS = 16, 8
_MB = 10**6
# Steps of the recording that tells how many bytes a step takes.
_TRIAL_STEPS = 4


class Block(nn.Module):
    """Attention and MLP, checkpointed each, and together once more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = checkpoint(self.both, x, use_reentrant=True)
        return whole

    def both(self, x: Tensor) -> Tensor:
        x = checkpoint(self.attend, x, use_reentrant=False)
        again: Tensor = checkpoint(self.widen, x, use_reentrant=False)
        return again

    def attend(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        attended: Tensor = self.heads(normed, normed, normed, need_weights=False)[0]
        return x + attended

    def widen(self, x: Tensor) -> Tensor:
        widened: Tensor = self.mlp(self.second(x))
        return x + widened


def main() -> None:
    """Record the trace named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--megabytes", type=float, required=True)
    parser.add_argument("--stacks", action="store_true", help="record Python frames too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trial = Path(folder) / "trial.json"
        record(trial, _TRIAL_STEPS, options.stacks)
        step_bytes = trial.stat().st_size / _TRIAL_STEPS
    record(options.trace, math.ceil(options.megabytes * _MB / step_bytes), options.stacks)


def record(trace: Path, steps: int, stacks: bool) -> None:
    """Train and write the trace of so many steps."""
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda recorded: recorded.export_chrome_trace(str(trace)),
        record_shapes=True,
        with_stack=stacks,
    ) as profiler:
        for _ in range(steps + 1):
            optimizer.zero_grad()
            model(torch.randn(2, 8, WIDTH, requires_grad=True)).pow(2).mean().backward()
            optimizer.step()
            profiler.step()


if __name__ == "__main__":
    main()
