"""A profiler of its own over the first steps; a range outlives it."""

from tiny import STEPS, Trainer, say
from torch.profiler import ProfilerActivity, profile, record_function

trainer = Trainer()
with profile(activities=[ProfilerActivity.CPU]) as own:
    say("own", trainer.step())
    outer = record_function("outlives the profiler")
    outer.__enter__()
    say("own", trainer.step())
print("own profiler saw", any("outlives" in event.name for event in own.events()))
for number in range(STEPS):
    say(number, trainer.step())
    if number == 3:
        outer.__exit__(None, None, None)
