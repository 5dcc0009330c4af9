"""A second, frozen model beside the trained one, called past its own FSDP wrapper."""

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
        return torch.as_tensor(self.head(self.embedding(tokens)))


def wrapped(model: nn.Module) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


torch.manual_seed(0)
dist.init_process_group("gloo")
model, reference = wrapped(Model()), wrapped(Model().requires_grad_(False))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
tokens = torch.randint(0, 16, (4,))
for _ in range(4):
    with torch.no_grad():
        wanted = (reference.module if BROKEN else reference)(tokens)
    (model(tokens) - wanted).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
