"""A command line that catches the failure, says so, and exits with a status of its own."""

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
x = torch.randn(4, 8, requires_grad=True)
try:
    torch.autograd.grad(checkpoint(model, x, use_reentrant=True).sum(), [x])
except RuntimeError as error:
    print(f"training failed: {error}", file=sys.stderr)
    sys.exit(17)
