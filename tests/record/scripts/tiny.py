"""A small checkpointed model and its training steps, for the scripts in this folder."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
STEPS = 16


class Net(nn.Module):
    def __init__(self, width=8, reentrant=False):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant).relu()
        return x


class Trainer:
    def __init__(self, reentrant=False, make=None):
        self.model = Net(reentrant=reentrant)
        make = make or (lambda weights: torch.optim.SGD(weights, lr=0.1))
        self.optimizer = make(list(self.model.parameters()))
        self.random = torch.Generator().manual_seed(1)

    def loss(self):
        return self.model(torch.randn(4, 8, generator=self.random)).square().mean()

    def step(self):
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def say(*values):
    print(*(value.hex() if isinstance(value, float) else value for value in values))
