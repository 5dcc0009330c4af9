"""Says things when it ends, and sets an exit status while other exits are under way."""

import atexit
import sys
import threading

from tiny import STEPS, Trainer, say

atexit.register(print, "last")
atexit.register(lambda: print("main is", sys.modules["__main__"].__file__.endswith("at_exit.py")))
trainer = Trainer()
for number in range(STEPS):
    say(number, trainer.step())
done = threading.Event()


def late():
    done.wait(0.2)
    print("a thread that ends after the script")


threading.Thread(target=late).start()
sys.exit(4)
