"""A checkpointed block that counts its calls, compiled as one graph."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.linear(x)
        return out


block = Counted()


@torch.compile(backend="eager", fullgraph=True)
def step(x: Tensor) -> Tensor:
    out: Tensor = checkpoint(block, x, use_reentrant=False)
    return out


step(torch.randn(4, 8)).sum().backward()
