"""Trains on in a function that is called at its exit."""

import atexit

from tiny import STEPS, Trainer, say

trainer = Trainer()


@atexit.register
def more():
    for number in range(3):
        say("late", number, trainer.step())


for number in range(STEPS):
    say(number, trainer.step())
