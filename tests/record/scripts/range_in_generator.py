"""A loader that is a generator holds a range open while its batch is trained on."""

import contextlib

from tiny import STEPS, Trainer, say
from torch.profiler import record_function


def batches():
    with record_function("epoch"):
        for number in range(STEPS // 4):
            with record_function(f"batch {number}"):
                yield number


trainer = Trainer()
for epoch in range(5):
    with contextlib.ExitStack() as stack:
        for number in batches():
            stack.enter_context(record_function("kept until the epoch ends"))
            say(epoch, number, trainer.step())
