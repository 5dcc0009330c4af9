"""Rank 0 gathers the sharded state and saves; the others train on. No barrier anywhere."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

BROKEN = True


def save_checkpoint(model: FullyShardedDataParallel, path: str) -> None:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, path)


torch.manual_seed(0)
dist.init_process_group("gloo")
model = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(6):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 3 and (dist.get_rank() == 0 or not BROKEN):
        save_checkpoint(model, sys.argv[1])
