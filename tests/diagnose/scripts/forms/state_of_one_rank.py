"""Optimizer state in 16 bit on one rank of two, gathered as sharded state."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

BROKEN = True

torch.manual_seed(0)
dist.init_process_group("gloo")
model = FullyShardedDataParallel(
    nn.Linear(8, 8), device_id=torch.device("cpu"), use_orig_params=True
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(4):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if BROKEN and dist.get_rank() == 0:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].half()
with FullyShardedDataParallel.state_dict_type(
    model,
    StateDictType.SHARDED_STATE_DICT,
    ShardedStateDictConfig(),
    ShardedOptimStateDictConfig(),
):
    FullyShardedDataParallel.optim_state_dict(model, optimizer)
