"""Ends by an exception that nobody catches, with one before it, and a hook for both."""

import sys

from tiny import STEPS, Trainer, say


def hook(kind, error, trace):
    depth = 0
    while trace is not None:
        depth, trace = depth + 1, trace.tb_next
    print("hook:", kind.__name__, error, repr(error.__cause__), depth)
    sys.__excepthook__(kind, error, None)


sys.excepthook = hook
trainer = Trainer()
for number in range(STEPS):
    say(number, trainer.step())
    if number == 12:
        try:
            {}["nothing"]
        except KeyError as error:
            raise RuntimeError("at step 12") from error
