"""A step function with a range as its decorator, and one that calls itself inside it."""

from tiny import STEPS, Trainer, say
from torch.profiler import record_function

trainer = Trainer()


@record_function("decorated")
def train_step(again=True):
    loss = trainer.step()
    if again:
        train_step(again=False)
    return loss


for number in range(STEPS):
    say(number, train_step())
