"""A checkpoint inside torch.func.grad."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def loss(x: Tensor) -> Tensor:
    return checkpoint(lambda y: y.sin().sum(), x, use_reentrant=False)


torch.func.grad(loss)(torch.randn(4))
