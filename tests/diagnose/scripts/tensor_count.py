"""A checkpointed block that does more the first time: fewer tensors saved in its recompute."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = torch.tanh(self.first(x))
        if self.calls % 2:
            x = torch.tanh(self.second(x))
        return x


model = Block()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(4):
    checkpoint(model, torch.randn(4, 8), use_reentrant=False).sum().backward()
    optimizer.step()
