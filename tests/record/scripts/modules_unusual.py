"""Checkpoints around a module that cannot be hashed, and around modules of TorchScript."""

import dataclasses

import torch
from tiny import STEPS, Trainer, say
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclasses.dataclass
class Compared(nn.Module):
    width: int = 8

    def __post_init__(self):
        super().__init__()
        self.layer = nn.Linear(self.width, self.width)

    def forward(self, x):
        return self.layer(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.scripted = torch.jit.script(nn.Linear(8, 8))
        self.traced = torch.jit.trace(nn.Linear(8, 8), torch.ones(4, 8))

    def forward(self, x):
        for layer in (self.scripted, self.traced):
            x = checkpoint(layer, self.first(x), use_reentrant=True)
        return checkpoint(compared, x, use_reentrant=False)


trainer = Trainer()
compared = Compared()
trainer.model = Net()
weights = [*trainer.model.parameters(), *compared.layer.parameters()]
trainer.optimizer = torch.optim.SGD(weights, lr=0.1)
for number in range(STEPS):
    say(number, trainer.step())
