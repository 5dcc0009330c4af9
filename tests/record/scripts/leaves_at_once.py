"""Ends by `os._exit`, with something in the buffer of standard output."""

import os
import sys

from tiny import STEPS, Trainer, say

trainer = Trainer()
for number in range(STEPS):
    say(number, trainer.step())
sys.stdout.flush()
print("never written to a file or a pipe")
os._exit(9)
