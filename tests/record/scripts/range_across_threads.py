"""Ranges are opened in one thread and closed in another, some steps later."""

import queue
import threading

from tiny import STEPS, Trainer, say
from torch.profiler import record_function

opened = queue.Queue()


def close():
    while (one := opened.get()) is not None:
        one.__exit__(None, None, None)


thread = threading.Thread(target=close)
thread.start()
trainer = Trainer()
waiting = []
for number in range(STEPS):
    one = record_function(f"batch {number}")
    one.__enter__()
    waiting.append(one)
    say(number, trainer.step())
    if len(waiting) > 1:
        opened.put(waiting.pop(0))
opened.put(None)
thread.join()
for one in waiting:
    one.__exit__(None, None, None)
