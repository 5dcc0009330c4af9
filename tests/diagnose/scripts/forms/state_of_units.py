"""Optimizer state in 16 bit on one rank, of a model of several units, gathered in full."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

BROKEN = True

torch.manual_seed(0)
dist.init_process_group("gloo")
model = FullyShardedDataParallel(
    nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)),
    device_id=torch.device("cpu"),
    auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    use_orig_params=True,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(4):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if BROKEN and dist.get_rank() == 1:
    for state in optimizer.state.values():
        state.update({name: value.bfloat16() for name, value in state.items() if name != "step"})
with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
    FullyShardedDataParallel.optim_state_dict(model, optimizer)
