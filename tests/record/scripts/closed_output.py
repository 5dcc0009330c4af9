"""Closes its standard output and error, and goes on."""

import os
import sys

from tiny import STEPS, Trainer, say

trainer = Trainer()
for number in range(3):
    say(number, trainer.step())
sys.stdout.close()
sys.stderr.close()
os.close(1)
os.close(2)
for number in range(2 * STEPS):
    trainer.step()
sys.exit(6)
