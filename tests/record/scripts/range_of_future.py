"""Ranges that end with a future, steps later; ranges inside TorchScript."""

import torch
from tiny import STEPS, Trainer, say
from torch.profiler import record_function


@torch.jit.script
def scripted(x: torch.Tensor):
    with torch.autograd.profiler.record_function("scripted"):
        return x * 2


trainer = Trainer()
futures = []
for number in range(STEPS):
    with record_function("until the future") as one:
        future = torch.futures.Future()
        futures.append((future, one._call_end_callbacks_on_future(future)))
        say(number, trainer.step())
    if len(futures) > 2:
        first, _ = futures.pop(0)
        first.set_result(scripted(torch.ones(2)))
for future, _ in futures:
    future.set_result(torch.ones(2))
