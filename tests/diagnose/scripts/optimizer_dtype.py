"""Optimizer state of different dtypes on two ranks, gathered by FSDP for saving."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

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
if (
    BROKEN and dist.get_rank() == 1
):  # as an optimizer does that keeps 16-bit state for some pieces only
    for state in optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()
FullyShardedDataParallel.optim_state_dict(model, optimizer)
