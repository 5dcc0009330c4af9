"""Keyword arguments handed to a reentrant checkpoint, which takes none."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        out: torch.Tensor = scale * self.linear(x)
        return out


model = Block()
x = torch.randn(4, 8, requires_grad=True)
checkpoint(model, x, scale=2.0, use_reentrant=True).sum().backward()
