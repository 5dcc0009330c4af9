"""Two threads train models of their own, with ranges, beside the main one."""

import threading

from tiny import STEPS, Trainer, say
from torch.profiler import record_function

results = {}


def train(name):
    trainer = Trainer()
    losses = []
    for _ in range(3 * STEPS):
        with record_function(name):
            losses.append(trainer.step())
    results[name] = losses


threads = [threading.Thread(target=train, args=(f"thread {n}",)) for n in range(2)]
trainers = [Trainer() for _ in range(1)]
for thread in threads:
    thread.start()
for number in range(STEPS):
    with record_function("main"):
        say(number, trainers[0].step())
for thread in threads:
    thread.join()
print(sorted(results), [len(one) for one in results.values()])
