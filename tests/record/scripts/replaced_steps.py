"""Replaces optimizers' `step`: on the class, on the instance, with a scheduler on top."""

import functools

import torch
from tiny import STEPS, Trainer, say

original = torch.optim.SGD.step
calls = []


@functools.wraps(original)
def step(self, closure=None):
    calls.append("class")
    return original(self, closure)


torch.optim.SGD.step = step
trainer = Trainer()
scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, step_size=4)
inner = trainer.optimizer.step


def on_instance(*args, **kwargs):
    calls.append("instance")
    return inner(*args, **kwargs)


trainer.optimizer.step = on_instance
for number in range(STEPS):
    say(number, trainer.step())
    scheduler.step()
print(len(calls), torch.optim.SGD.step is step, scheduler.get_last_lr())
