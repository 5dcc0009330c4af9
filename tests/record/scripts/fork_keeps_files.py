"""A forked child leaves a file open, prints at its exit, and comes to the script's end."""

import atexit
import os
import sys
import tempfile

from tiny import STEPS, Trainer, say
from torch.profiler import record_function

folder = tempfile.mkdtemp()
trainer = Trainer()
child = None
for number in range(STEPS):
    with record_function("step"):
        loss = trainer.step()
        if number == 6:
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                file = open(os.path.join(folder, "left"), "w")
                file.write("not closed, not flushed")
                atexit.register(print, "the child's exit")
    if child != 0:
        say(number, loss)
if child:
    _, status = os.waitpid(child, 0)
    print("child ended with", os.waitstatus_to_exitcode(status))
    print(open(os.path.join(folder, "left")).read())
