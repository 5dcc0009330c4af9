"""Every warning is an error, and torch's profiler warns when it is made, started and stopped."""

import warnings

warnings.simplefilter("error")

import torch.autograd.profiler as profiler
from tiny import STEPS, Trainer, say

# As if torch's own lines did.
WARNS = """
import warnings
def around(real):
    def warns(*args, **kwargs):
        warnings.warn("Profiler clears events at the end of each cycle")
        return real(*args, **kwargs)
    return warns
"""
torchs = {"__name__": "torch.autograd.profiler"}
exec(WARNS, torchs)
for name in ("__init__", "_start_trace", "__exit__"):
    setattr(profiler.profile, name, torchs["around"](getattr(profiler.profile, name)))
trainer = Trainer()
for number in range(STEPS):
    say(number, trainer.step())
try:
    warnings.warn("of the script", stacklevel=1)
except UserWarning as warning:
    print(warning)
