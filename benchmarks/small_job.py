"""A small training job for the launchers and faults: FSDP, with one checkpoint a layer or two.

    python small_job.py doubled|repaired [--spawn N] [--fault KIND --rank R --step S]

It counts how often a layer's forward runs in the backward pass, by itself, and leaves the count
in ``truth-rank<R>.json``: forward runs, and those inside a backward pass.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from pathlib import Path

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
runs = {"forward": 0, "in_backward": 0}


class Block(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed and self.training:
            result: torch.Tensor = checkpoint(self.inner, x, use_reentrant=True)
            return result
        return self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        backward = torch._C._current_graph_task_id() != -1
        runs["in_backward" if backward else "forward"] += 1
        result: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return result


def ranks() -> tuple[int, int]:
    """Rank and number of ranks, as torchrun, Open MPI or nobody says it."""
    for rank, size in (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def train(rank: int, world_size: int, options: argparse.Namespace) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(options.port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    doubled = options.example == "doubled"
    model = FullyShardedDataParallel(
        nn.Sequential(*(Block(checkpointed=doubled) for _ in range(4))),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
    )
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    try:
        for step in range(options.steps):
            if options.fault and rank == options.rank and step == options.step:
                fail(options.fault)
            model(torch.randn(16, 64, requires_grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if options.fault == "slow":
                time.sleep(0.05)
    finally:
        Path(f"truth-rank{rank}.json").write_text(json.dumps(runs))


def fail(kind: str) -> None:
    """Do what goes wrong in real jobs."""
    if kind == "raise":
        raise ValueError("a batch that cannot be")
    if kind == "exit":
        sys.exit(3)
    if kind == "os-exit":
        os._exit(5)
    if kind == "kill":
        os.kill(os.getpid(), 9)
    if kind == "hang":
        time.sleep(10_000)
    if kind == "end":
        sys.exit(0)


def in_process(index: int, options: argparse.Namespace) -> None:
    train(index, options.spawn, options)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train four layers under FSDP.")
    parser.add_argument("example", choices=["doubled", "repaired"])
    parser.add_argument("--spawn", type=int, default=0)
    parser.add_argument("--fault", default="")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--step", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--local_rank", "--local-rank", type=int, help="given by deepspeed")
    options = parser.parse_args()
    if options.spawn:
        spawn(in_process, (options,), nprocs=options.spawn)  # type: ignore[no-untyped-call]
    else:
        rank, world_size = ranks()
        if rank == 0:
            print(f"training on {socket.gethostname()} and {world_size - 1} more", flush=True)
        train(rank, world_size, options)


if __name__ == "__main__":
    main()
