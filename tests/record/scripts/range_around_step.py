"""The whole step stands inside a range."""

from tiny import STEPS, Trainer, say
from torch.profiler import record_function

trainer = Trainer()
for number in range(STEPS):
    with record_function("train_step"):
        say(number, trainer.step())
