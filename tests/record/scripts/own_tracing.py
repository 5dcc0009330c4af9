"""Functions of its own for `sys.setprofile` and `sys.settrace`."""

import sys
import threading

from tiny import STEPS, Trainer, say

counts = {"profile": 0, "trace": 0}


def marked():
    return 1


def profile(frame, event, arg):
    if frame.f_code is marked.__code__ and event == "call":
        counts["profile"] += 1


def trace(frame, event, arg):
    if frame.f_code is marked.__code__ and event == "call":
        counts["trace"] += 1


trainer = Trainer()
sys.setprofile(profile)
sys.settrace(trace)
for number in range(STEPS):
    marked()
    say(number, trainer.step())
print(counts, sys.getprofile() is profile, sys.gettrace() is trace)
print(threading.getprofile() if hasattr(threading, "getprofile") else None)
