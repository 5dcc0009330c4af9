"""A small training job to break: four layers under FSDP, each checkpointed twice.

Its options: ``--spawn N``, ``--sleep SECONDS`` in each step, ``--fault KIND --rank R --step S``.
"""

import argparse
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.multiprocessing.spawn import spawn
from torch.utils.checkpoint import checkpoint

STEPS = 1000
SIGNALS = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.inner, x, use_reentrant=True)
        return result

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return result


def train(rank: int, world_size: int, options: argparse.Namespace) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(options.port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Sequential(*(Block() for _ in range(4))),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
    )
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(options.steps):
        if options.fault and rank == options.rank and step == options.step:
            fail(options.fault)
        model(torch.randn(16, 64, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(options.sleep)


class NoImport:
    """An import hook that takes everything for a mistake."""

    def find_spec(self, name: str, *others: object) -> None:
        raise RuntimeError(f"nobody asked for {name}, {others!r}")


def fail(kind: str) -> None:
    """Do what goes wrong in real jobs."""
    if kind == "raise":
        raise ValueError("a batch that cannot be")
    if kind == "exit":
        sys.exit(3)
    if kind == "os-exit":
        os._exit(5)
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
    if kind == "hang":
        time.sleep(10_000)
    if kind == "end":
        sys.exit(0)
    if kind == "exec":
        os.execv(sys.executable, [sys.executable, "-c", "print('another program')"])
    if kind == "no-import":
        sys.path_hooks.clear()
        sys.meta_path.insert(0, NoImport())


def in_process(index: int, options: argparse.Namespace) -> None:
    train(index, options.spawn, options)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train four layers under FSDP.")
    parser.add_argument("--spawn", type=int, default=0)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--fault", default="")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--step", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--port", type=int, default=29517)
    options = parser.parse_args()
    if options.spawn:
        spawn(in_process, (options,), nprocs=options.spawn)
    else:
        train(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), options)


if __name__ == "__main__":
    main()
