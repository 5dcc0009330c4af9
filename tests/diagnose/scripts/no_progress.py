"""A single process that waits for something that never comes."""

import threading

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
threading.Event().wait()
