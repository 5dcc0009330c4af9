"""A forked child trains and runs to the script's end; another ends by `os._exit`."""

import os

from tiny import STEPS, Trainer, say

trainer = Trainer()
say(trainer.step())
leaves = os.fork()  # with something in the buffer of standard output
if leaves == 0:
    print("never written")
    os._exit(3)
_, status = os.waitpid(leaves, 0)
print("child ended with", os.waitstatus_to_exitcode(status))
child = os.fork()
for number in range(STEPS):
    loss = trainer.step()
    if child:
        say(number, loss)
if child:
    _, status = os.waitpid(child, 0)
    print("child ended with", os.waitstatus_to_exitcode(status))
