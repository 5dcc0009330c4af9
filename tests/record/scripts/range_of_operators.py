"""A range around the step by torch's own operators; inside it, one by torch's fast class."""

import torch
from tiny import STEPS, Trainer, say

trainer = Trainer()
fast = getattr(torch._C._profiler, "_RecordFunctionFast", torch.profiler.record_function)
for number in range(STEPS):
    handle = torch.ops.profiler._record_function_enter_new("step by operator", None)
    with fast("forward by the fast class"):
        loss = trainer.loss()
    loss.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    say(number, loss.item())
    torch.ops.profiler._record_function_exit._RecordFunction(handle)
