"""One rank leaves its loop early; the other waits for it in the next step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
batches = 3 if dist.get_rank() == 0 else 2
for _ in range(batches):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
dist.barrier()
