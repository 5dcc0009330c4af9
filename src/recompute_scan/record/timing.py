"""Step times without a profiler: the honest ones."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Literal

import torch


class StepTimer:
    """Times the steps between boundaries.

    On a GPU an event is recorded on the current stream at each boundary and read only after the
    last, so that timing adds no synchronisation to the steps. On a CPU the clock is read.
    """

    def __init__(self, device: Literal["cpu", "cuda"]) -> None:
        self._cuda = device == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        if self._cuda:
            torch.cuda.synchronize()
        self.mark()

    def mark(self) -> None:
        """A step begins here, and the one before ends."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    @property
    def steps(self) -> int:
        """Steps timed so far."""
        return len(self._events or self._times) - 1

    def milliseconds(self) -> tuple[float, ...]:
        """Duration of each step in ms, in order. Waits for the GPU."""
        if self._cuda:
            torch.cuda.synchronize()
            events = self._events
            return tuple(float(begin.elapsed_time(end)) for begin, end in pairwise(events))
        times = self._times
        return tuple((end - begin) * 1e3 for begin, end in pairwise(times))
