"""A checkpoint inside torch.func.grad."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def loss(x: Tensor) -> Tensor:
    out: Tensor = checkpoint(lambda y: y.sin().sum(), x, use_reentrant=False)
    return out


torch.func.grad(loss)(torch.randn(4))
