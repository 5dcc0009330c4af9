"""A reentrant checkpoint asked for gradients of chosen inputs only."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
x = torch.randn(4, 8, requires_grad=True)
loss = checkpoint(model, x, use_reentrant=True).sum()
torch.autograd.grad(loss, [x])
