"""Forks when everything has long been recorded."""

import os
import sys

from tiny import STEPS, Trainer, say

trainer = Trainer()
for number in range(2 * STEPS):
    say(number, trainer.step())


def fork(status):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        sys.exit(status)
    _, ended = os.waitpid(child, 0)
    print("child ended with", os.waitstatus_to_exitcode(ended))


fork(3)
fork("words")
