"""Its own profiler runs by a schedule, again and again, with ranges around the steps."""

from tiny import STEPS, Trainer, say
from torch.profiler import ProfilerActivity, profile, record_function, schedule

trainer = Trainer()
with profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(skip_first=2, wait=5, warmup=1, active=2, repeat=3),
    on_trace_ready=lambda one: print("ready", one.step_num),
) as own:
    for number in range(3 * STEPS):
        with record_function(f"iteration {number}"):
            say(number, trainer.step())
        own.step()
