"""A block under a selective checkpoint that runs other operators in its recompute."""

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.linear(x) if self.calls == 1 else x @ self.linear.weight
        return torch.sigmoid(torch.sin(torch.sigmoid(x)))


contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
x = torch.randn(4, 8, requires_grad=True)
checkpoint(Block(), x, use_reentrant=False, context_fn=contexts).sum().backward()
