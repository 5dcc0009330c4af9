"""A custom autograd function that reads ``ctx.saved_tensors`` twice, inside a checkpoint."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight = ctx.saved_tensors[1]
        x = ctx.saved_tensors[0]
        return grad * weight, (grad * x).sum(0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scale.apply(self.linear(x), self.weight)  # type: ignore[no-any-return]


model = Block()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(4):
    checkpoint(model, torch.randn(4, 8), use_reentrant=False).sum().backward()
    optimizer.step()
