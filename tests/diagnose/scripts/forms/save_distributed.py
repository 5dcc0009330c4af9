"""torch.distributed.checkpoint, which all ranks have to call, called by rank 0 alone."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FullyShardedDataParallel

BROKEN = True

torch.manual_seed(0)
dist.init_process_group("gloo")
model = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(4):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
state = {"step": torch.tensor(4), "weight": torch.zeros(8)}
if dist.get_rank() == 0 or not BROKEN:
    save(state, checkpoint_id=sys.argv[1] + ".dcp")
dist.barrier()
