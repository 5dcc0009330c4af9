"""The whole step is compiled, its optimizer with it: hooks run while Python frames are compiled."""

import torch
from tiny import STEPS, Trainer, say
from torch._dynamo.utils import counters

for reentrant in (False, True):
    trainer = Trainer(reentrant)
    step = torch.compile(trainer.step, backend="eager")
    for _ in range(STEPS):
        say(step())
say(*sorted(f"{name}: {count}" for name, count in counters["frames"].items()))
say(*sorted(f"{reason}: {count}" for reason, count in counters["graph_break"].items()))
