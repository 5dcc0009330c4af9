"""Counts every function of torch that is called, attributes of tensors among them."""

import torch
from tiny import STEPS, Trainer, say
from torch.overrides import TorchFunctionMode


class Counted(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        # torch's profiler itself reads it, of each module's weights, where it records stacks.
        Counted.calls += function != torch.Tensor.grad.__get__
        return function(*args, **(kwargs or {}))


trainers = Trainer(), Trainer(reentrant=True)
for trainer in trainers:
    for _ in range(STEPS):
        with Counted():
            loss = trainer.loss()
            loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        say(loss.item(), Counted.calls)
