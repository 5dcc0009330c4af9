"""A method of the inner model called past FSDP, as generate() is."""

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

    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        return self(tokens).argmax(dim=-1)  # type: ignore[no-any-return]


torch.manual_seed(0)
dist.init_process_group("gloo")
model = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
tokens = torch.randint(0, 16, (4,))
for _ in range(4):
    model(tokens).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if BROKEN:
    model.module.generate(tokens)  # type: ignore[operator]
else:
    with FullyShardedDataParallel.summon_full_params(model):
        model.module.generate(tokens)  # type: ignore[operator]
