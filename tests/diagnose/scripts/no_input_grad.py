"""A reentrant checkpoint without an input that needs a gradient, and nothing trainable after it."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
embedding = nn.Embedding(16, 8).requires_grad_(False)
block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
optimizer = torch.optim.SGD(block.parameters(), lr=1e-3)
for _ in range(4):
    x = embedding(torch.randint(0, 16, (4,)))
    checkpoint(block, x, use_reentrant=True).sum().backward()
    optimizer.step()
