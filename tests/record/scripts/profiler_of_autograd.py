"""`torch.autograd.profiler.profile` around every third step, and its ranges."""

import torch
from tiny import STEPS, Trainer, say

trainer = Trainer()
for number in range(2 * STEPS):
    if number % 3:
        with torch.autograd.profiler.record_function("plain step"):
            say(number, trainer.step())
    else:
        with torch.autograd.profiler.profile() as own:
            say(number, trainer.step())
        print("own profiler saw", len(own.function_events) > 0)
