"""Selective checkpointing keeps an operator's output, and the block then changes it in place."""

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
    kept = op == torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.delta = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        out += torch.sin(x)
        return torch.sin(self.delta(torch.sin(out)))


contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
x = torch.randn(4, 8, requires_grad=True)
checkpoint(Block(), x, use_reentrant=False, context_fn=contexts).sum().backward()
