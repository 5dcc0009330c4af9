"""The shape of a fine-tuning recipe: a profiler in a context function, stepped in each batch."""

import contextlib

import torch
from tiny import STEPS, Trainer, say


@contextlib.contextmanager
def profile(use_profiler, wait=1, warmup=2, active=3):
    if not use_profiler:
        yield contextlib.nullcontext()
        return
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1),
        on_trace_ready=lambda one: print("trace ready"),
        profile_memory=False,
        with_stack=False,
        with_flops=True,
        record_shapes=True,
    ) as own:
        yield own


trainer = Trainer()
for epoch in range(3):
    with profile(epoch == 0) as own:
        for number in range(2 * STEPS):
            say(epoch, number, trainer.step())
            if epoch == 0:
                own.step()
        if epoch == 0:
            print("profiled", own.step_num)
