"""Replaces `sys.stdout` and `sys.stderr`, and turns warnings into errors."""

import contextlib
import io
import sys
import warnings

from tiny import STEPS, Trainer, say

trainer = Trainer()
real = sys.stdout
sys.stdout = io.StringIO()
sys.stderr = None
warnings.simplefilter("error")
for number in range(STEPS):
    say(number, trainer.step())
with contextlib.redirect_stdout(io.StringIO()) as inner:
    say("inside", trainer.step())
kept, sys.stdout = sys.stdout.getvalue(), real
print(kept, inner.getvalue())
print(len(warnings.filters) > 0, warnings.filters[0][0])
