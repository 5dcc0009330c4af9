"""Executors of processes and threads, an event loop, a queue, a process that is ended."""

import asyncio
import concurrent.futures
import multiprocessing
import time

from tiny import STEPS, Trainer, say


def square(number):
    if number == 3:
        raise ValueError("three")
    return number * number


async def train(trainer):
    loop = asyncio.get_running_loop()
    for number in range(STEPS):
        say(number, trainer.step())
        await asyncio.sleep(0)
    return await loop.run_in_executor(None, square, 4)


if __name__ == "__main__":
    trainer = Trainer()
    context = multiprocessing.get_context("fork")
    say(trainer.step())
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        print([pool.submit(square, number).exception() for number in range(5)])
    print(asyncio.run(train(trainer)))
    queue = context.Queue()
    process = context.Process(target=queue.put, args=("put",))
    process.start()
    print(queue.get(timeout=30))
    process.join()
    process = context.Process(target=time.sleep, args=(100,), daemon=True)
    process.start()
    process.terminate()
    process.join()
    print(process.exitcode)
