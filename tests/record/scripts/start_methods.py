"""Processes by fork, forkserver and spawn, and a pool of each kind."""

import multiprocessing
import sys


def work(number):
    return number * number


def leave(number):
    sys.exit(number)


def fail():
    raise KeyError("in a child")


if __name__ == "__main__":
    from tiny import STEPS, Trainer, say

    trainer = Trainer()
    for method in ("fork", "forkserver", "spawn"):
        context = multiprocessing.get_context(method)
        for target, args in ((leave, (7,)), (leave, ("words",)), (fail, ()), (work, (3,))):
            process = context.Process(target=target, args=args)
            process.start()
            process.join()
            print(method, target.__name__, process.exitcode)
        with context.Pool(1) as pool:
            print(pool.map(work, range(5)))
        say(trainer.step())
    for number in range(STEPS):
        say(number, trainer.step())
