"""An optimizer that was not given every trainable parameter of an FSDP unit, saved by FSDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

torch.manual_seed(0)
dist.init_process_group("gloo")
model = FullyShardedDataParallel(
    nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
    device_id=torch.device("cpu"),
    use_orig_params=True,
)
optimizer = torch.optim.AdamW(list(model.parameters())[:2], lr=1e-3)
for _ in range(4):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
FullyShardedDataParallel.optim_state_dict(model, optimizer)
