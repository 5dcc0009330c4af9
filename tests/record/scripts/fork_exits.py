"""A forked child ends by `sys.exit`, in the middle of the training."""

import os
import sys

from tiny import STEPS, Trainer, say

trainer = Trainer()
for number in range(STEPS):
    say(number, trainer.step())
    if number in (0, 4, 6):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            print("child", number)
            sys.exit(5)
        _, status = os.waitpid(child, 0)
        print("child ended with", os.waitstatus_to_exitcode(status))
