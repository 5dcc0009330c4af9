"""Its own profiler has ended, and is stepped on."""

from tiny import STEPS, Trainer, say
from torch.profiler import ProfilerActivity, profile, schedule

trainer = Trainer()
with profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=1, warmup=1, active=1, repeat=1),
    on_trace_ready=lambda one: print("ready", one.step_num),
) as own:
    for number in range(2 * STEPS):
        say(number, trainer.step())
        own.step()
for number in range(STEPS):
    say(number, trainer.step())
    own.step()
