"""Interrupted by hand; the first time it goes on, the second time it ends."""

import signal

from tiny import STEPS, Trainer, say

trainer = Trainer()
try:
    for number in range(STEPS):
        say(number, trainer.step())
        if number == 6:
            signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted at", number)
for number in range(STEPS):
    say(number, trainer.step())
raise KeyboardInterrupt
