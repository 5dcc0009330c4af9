"""Counts operators and functions by modes of its own, with and without ranges."""

from collections import Counter

from tiny import STEPS, Trainer, say
from torch.overrides import TorchFunctionMode
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

counted = Counter()


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        counted[str(function)] += 1
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        counted[getattr(function, "__name__", "function")] += 1
        return function(*args, **(kwargs or {}))


trainer = Trainer()
with Operators(), Functions():
    for number in range(STEPS):
        if number % 2:
            with record_function("step"):
                say(number, trainer.step())
        else:
            say(number, trainer.step())
for name, count in sorted(counted.items()):
    print(name, count)
