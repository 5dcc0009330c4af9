"""Ranges that are still open when their profiler ends: ended there and then, or known to be open.

A range of ``record_function`` keeps a pointer into the memory of the profiler under which it was
opened. torch frees that memory when the profiler ends, and writes to it when the range closes, if
any other profiler runs in its thread by then (``onFunctionExit`` in profiler_kineto.cpp and
``RecordFunction::end`` in record_function.cpp, the same in 2.1 to 2.13): scripts die of it, at once
or much later. With no profiler running it writes nothing, and a range that has been ended twice is
as one ended once. So what a profiler leaves open is ended while none runs. Ranges that cannot be
got hold of (those of compiled code, of torch's operators called directly) leave the process
unsafe for another profiler.
"""

from __future__ import annotations

import _thread
import gc
from collections import Counter
from typing import Any

import torch
from torch.autograd.profiler import record_function

# Names of ranges that nobody could end, of profilers that have ended in this process.
_left: Counter[str] = Counter()


def still_open() -> tuple[str, ...]:
    """Names of ranges that may be open under a profiler that has ended: no other may start."""
    return tuple(_left)


def end_left_open(results: Any) -> None:
    """A profiler has ended: end the ranges that it leaves open.

    Args:
        results: What torch's compiled part gave at its end, ``kineto_results``; ``None`` where it
            gives nothing, as for ``emit_nvtx``: then every open range is ended.
    """
    unfinished = None
    if results is not None:
        # No thread has ended them: logical thread numbers begin at 1.
        names = (event.name() for event in results.events() if not event.end_thread_id())
        unfinished = Counter(names)
        if not unfinished:
            return
    found: Counter[str] = Counter()
    handles = []
    for one in gc.get_objects():
        # type(), because isinstance() asks proxies for their class, and may run anything.
        opened = issubclass(type(one), record_function) and one.record is not None
        if opened and (unfinished is None or one.name in unfinished):
            found[one.name] += 1
            handles.append(one.record)
    _end(handles)
    _left.update((unfinished or Counter()) - found)


def _end(handles: list[Any]) -> None:
    """End ranges where no profiler runs and no mode of dispatch is on: in a thread of their own."""
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        try:
            for handle in handles:
                torch.ops.profiler._record_function_exit._RecordFunction(handle)
        finally:
            done.release()

    # Not a threading.Thread: the script would find it among its own.
    _thread.start_new_thread(run, ())
    done.acquire()
