"""Errors that nobody catches in threads, with hooks of its own, while the main one trains."""

import sys
import threading

from tiny import STEPS, Trainer, say

caught = []
threading.excepthook = lambda args: caught.append(args.exc_type.__name__)
sys.unraisablehook = lambda args: caught.append("unraisable")


def fail():
    trainer = Trainer()
    trainer.step()
    raise OverflowError("in a thread")


def leave():
    sys.exit(1)


trainer = Trainer()
for number in range(STEPS):
    if number % 5 == 0:
        for target in (fail, leave):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    say(number, trainer.step())
print(sorted(caught), threading.active_count(), [one.name for one in threading.enumerate()])
