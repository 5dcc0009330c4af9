"""A profiler of its own in another thread, while the main one trains."""

import threading

import torch
from tiny import STEPS, Trainer, say
from torch.profiler import ProfilerActivity, profile

trainer = Trainer()
go, done = threading.Event(), threading.Event()
seen = []


def observe():
    go.wait()
    with profile(activities=[ProfilerActivity.CPU]) as own:
        torch.ones(3).sum()
    seen.append(any(event.name == "aten::sum" for event in own.events()))
    done.set()


thread = threading.Thread(target=observe)
thread.start()
for number in range(STEPS):
    say(number, trainer.step())
    if number == STEPS - 3:
        go.set()
        done.wait()
thread.join()
print(seen)
