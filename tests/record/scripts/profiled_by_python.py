"""Runs under `cProfile`, and counts how often a function of its own is called."""

import cProfile
import pstats

from tiny import STEPS, Trainer, say


def marked():
    return 1


trainer = Trainer()
with cProfile.Profile() as profile:
    for number in range(STEPS):
        marked()
        say(number, trainer.step())
counted = pstats.Stats(profile).stats
print([counts[0] for (_, _, name), counts in counted.items() if name == "marked"])
