"""A loop in plain PyTorch, its layers checkpointed twice; prints each loss to the last bit.

With ``--record FOLDER`` it records itself by ``recompute_scan.record``.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STEPS = 30


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.compute, x, use_reentrant=True)
        return result

    def compute(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.dropout(torch.relu(self.up(x))))
        return result


def train(steps: int, after_each: Callable[[], None]) -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(3))
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-3)
    for _ in range(steps):
        x = torch.randn(16, 32, requires_grad=True)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss", float(loss.item()).hex(), flush=True)
        after_each()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    if options.record is None:
        train(STEPS, lambda: None)
        return
    import recompute_scan as rs  # noqa: PLC0415 - the script alone needs nothing but torch

    with rs.record(steps=2, warmup=2, timing_steps=2, folder=options.record) as recording:
        train(STEPS, recording.step)
    print(json.dumps({"verdict": recording.scan.verdict}))


if __name__ == "__main__":
    main()
