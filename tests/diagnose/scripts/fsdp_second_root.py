"""An inner FSDP unit that is called before the model that holds it, and so became a root."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

BROKEN = True


def sharded(module: nn.Module) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


torch.manual_seed(0)
dist.init_process_group("gloo")
model = sharded(nn.Sequential(sharded(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 8)))
data = torch.randn(4, 8)
if BROKEN:
    model.module[0](data)  # type: ignore[index]
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(4):
    model(data).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
