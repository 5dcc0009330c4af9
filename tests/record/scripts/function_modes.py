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
for _ in range(STEPS):  # both in each step: what is looked at differs from step to step
    with Counted():
        losses = [trainer.loss() for trainer in trainers]
        sum(losses).backward()
    for trainer in trainers:
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    say(*(loss.item() for loss in losses), Counted.calls)
