"""Handlers of its own for signals: one raises in the middle of steps, one counts."""

import signal

from tiny import STEPS, Trainer, say


class Late(Exception):
    pass


counted = []


def late(number, frame):
    raise Late("too late")


signal.signal(signal.SIGUSR1, lambda number, frame: counted.append(number))
signal.signal(signal.SIGALRM, late)
trainer = Trainer()
late_at = 0
for number in range(2 * STEPS):
    signal.raise_signal(signal.SIGUSR1)
    try:
        loss = trainer.step()
        if number % 5 == 4:
            signal.raise_signal(signal.SIGALRM)
    except Late:
        late_at += 1
    say(number, loss)
print(len(counted), late_at, signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
