"""Two ranks with gloo: the other one is a process of its own, under a guard of its own."""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import recompute_scan
from tests.guard.nets import Net

ROOT = Path(__file__).resolve().parents[2]


def rank(number: int, file: str, steps: int) -> None:
    """The training of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=number, world_size=2)
    try:
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        for _ in range(steps):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        dist.destroy_process_group()


def both_ranks(steps: int) -> None:
    """Rank 0 here, rank 1 beside; fails if that one's guard tells anything."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "store")
        words = [sys.executable, "-m", "tests.guard.ranks", file, str(steps)]
        other = subprocess.Popen(words, cwd=ROOT)
        try:
            rank(0, file, steps)
        finally:
            status = other.wait(120)
        if status:
            raise RuntimeError(f"rank 1 has ended with status {status}")


if __name__ == "__main__":
    with recompute_scan.guard() as guard:
        rank(1, sys.argv[1], int(sys.argv[2]))
    sys.exit(len(guard.changes))
