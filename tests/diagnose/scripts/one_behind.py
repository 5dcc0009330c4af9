"""One rank waits for work of its own that never comes; the other waits for it in a barrier."""

import queue

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
if dist.get_rank() == 1:
    batches: queue.Queue[torch.Tensor] = queue.Queue()
    batches.get()
dist.barrier()
