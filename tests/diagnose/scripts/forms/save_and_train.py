"""Rank 0 saves and waits for the others in there; they train on. No barrier of the script's own."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BROKEN = True


def save_checkpoint(model: nn.Module, path: str) -> None:
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()


torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(6):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 3 and (dist.get_rank() == 0 or not BROKEN):
        save_checkpoint(model, sys.argv[1])
