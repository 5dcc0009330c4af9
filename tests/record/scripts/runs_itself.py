"""Runs itself as another process, and then becomes one by `os.execv`."""

import os
import subprocess
import sys

from tiny import STEPS, Trainer, say

trainer = Trainer()
for number in range(STEPS if len(sys.argv) == 1 else 2):
    say(sys.argv[1:], number, trainer.step())
if len(sys.argv) == 1:
    done = subprocess.run([sys.executable, __file__, "again"], capture_output=True, text=True)
    print(done.returncode, done.stdout)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, __file__, "instead"])
