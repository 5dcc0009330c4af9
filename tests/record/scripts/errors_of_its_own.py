"""Replaces standard error by something that can be written to, and nothing else."""

import sys

from tiny import STEPS, Trainer, say


class Kept:
    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text


sys.stderr = kept = Kept()
trainer = Trainer()
for _ in range(STEPS):
    say(trainer.step())
print("one of its own", file=sys.stderr)
sys.stderr = sys.__stderr__
say(kept.text)
