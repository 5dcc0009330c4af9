"""Uses numbers of descriptors that others opened, and ends with a status that counts its readers.

What is printed after it has put another object in place of `sys.stdout` is not its own.
"""

import atexit
import io
import os
import sys
import tempfile

from tiny import STEPS, Trainer, say


class Bye(SystemExit):
    asked = 0

    @property
    def code(self):
        Bye.asked += 1
        return 9


def check():
    if sys.stdout is not mine or mine.getvalue() != "mine" or Bye.asked != 1:
        os._exit(33)


trainer = Trainer()
say(trainer.step())
sys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding="utf-8", write_through=True)
sys.stderr = io.TextIOWrapper(sys.stderr.detach(), encoding="utf-8")
file = tempfile.TemporaryFile()
for number in range(200, 210):
    os.dup2(file.fileno(), number)
for number in range(STEPS):
    os.write(200 + number % 10, b"x")
    say(number, trainer.step())
print(os.fstat(file.fileno()).st_size, STEPS, flush=True)
sys.stdout = mine = io.StringIO()
print("mine", end="")
atexit.register(check)
raise Bye
