"""Module hooks and tensor hooks open and close ranges, some across a backward pass."""

from tiny import STEPS, Trainer, say
from torch.profiler import record_function

trainer = Trainer()
open_ranges = []


def before(module, args):
    one = record_function("from forward to the next forward")
    one.__enter__()
    open_ranges.append(one)
    if len(open_ranges) > 3:
        open_ranges.pop(0).__exit__(None, None, None)


def in_backward(gradient):
    with record_function("in a hook of backward"):
        return gradient * 1.0


trainer.model.first.register_forward_pre_hook(before)
for number in range(STEPS):
    loss = trainer.loss()
    loss.register_hook(in_backward)
    loss.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    say(number, loss.item())
