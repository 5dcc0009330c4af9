"""A layer of an FSDP model called past the model: its weight is a flat, sharded piece."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

BROKEN = True


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))  # type: ignore[no-any-return]


torch.manual_seed(0)
dist.init_process_group("gloo")
model = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"), use_orig_params=True)
tokens = torch.randint(0, 16, (4,))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
called = model.module.embedding if BROKEN else model
for _ in range(4):
    called(tokens).sum().backward()  # type: ignore[operator]
    optimizer.step()
    optimizer.zero_grad()
