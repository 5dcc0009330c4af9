"""A profiler of its own in the middle, begun inside a range around the step."""

from tiny import STEPS, Trainer, say
from torch.profiler import ProfilerActivity, profile, record_function

trainer = Trainer()
own = profile(activities=[ProfilerActivity.CPU])
for number in range(STEPS):
    with record_function("train_step"):
        say(number, trainer.step())
        if number in (5, 8):
            own.start()
        say(number, trainer.step())
    if number in (6, 9):
        own.stop()
        print("own profiler saw", sum(event.name == "train_step" for event in own.events()))
