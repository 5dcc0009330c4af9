"""Collectives that are waited for in the step after their own."""

import torch
from tiny import STEPS, Trainer, say
from torch import distributed

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
trainer = Trainer()
works = []
for number in range(STEPS):
    works.append(distributed.all_reduce(torch.ones(1 << 12), async_op=True))
    say(number, trainer.step())
    works.append(distributed.all_reduce(torch.ones(1 << 20), async_op=True))
    if len(works) > 3:
        works.pop(0).wait()
        works.pop(0).wait()
for work in works:
    work.wait()
distributed.destroy_process_group()
