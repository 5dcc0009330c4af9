"""A reentrant checkpoint around a block in which nothing needs a gradient but its input."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.detach())  # type: ignore[no-any-return]


x = torch.randn(4, 8, requires_grad=True)
checkpoint(Frozen(), x, use_reentrant=True).sum().backward()
