"""A forked child ends by an exception."""

import os
import sys

from tiny import STEPS, Trainer, say

trainer = Trainer()
for number in range(STEPS):
    say(number, trainer.step())
    if number in (1, 6):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            raise ValueError("the child's own")
        _, status = os.waitpid(child, 0)
        print("child ended with", os.waitstatus_to_exitcode(status))
