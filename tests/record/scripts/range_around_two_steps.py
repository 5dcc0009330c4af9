"""A range holds two steps."""

from tiny import STEPS, Trainer, say
from torch.profiler import record_function

trainer = Trainer(reentrant=True)
for number in range(STEPS):
    with record_function("a pair of steps"):
        say(number, trainer.step())
        say(number, trainer.step())
