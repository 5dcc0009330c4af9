"""Times of layers and steps, by events on a GPU and by the clock elsewhere.

On a CPU with one thread it is the time that this thread had the processor for, which other work on
the machine does not lengthen.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from recompute_scan.result.run_record import usual_ms

_STEP = -1


class Laps:
    """Times by layer and kind, summed up in each step.

    Kinds are ``whole`` (a checkpointed call), ``inner`` (the forward in it), ``again`` (its
    recompute) and ``kept``; a step has the layer -1.
    """

    def __init__(self, *, cuda: bool) -> None:
        self._cuda = cuda
        self._laps: list[tuple[int, int, str, Any, Any]] = []
        self._step = 0
        self._began = self._now()

    def next_step(self) -> None:
        """A step has ended."""
        now = self._now()
        self._laps.append((self._step, _STEP, "step", self._began, now))
        self._step, self._began = self._step + 1, now

    @contextmanager
    def lap(self, place: int, kind: str) -> Iterator[None]:
        """A layer runs in the ``with`` block."""
        step, began = self._step, self._now()
        try:
            yield
        finally:
            self._laps.append((step, place, kind, began, self._now()))

    def usual(self, *, without_first: bool = True) -> dict[tuple[int, str], float]:
        """The usual ms per step by layer and kind, waiting for the GPU.

        The first step finds the memory as another arrangement has left it, and does not count.
        """
        sums: dict[tuple[int, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
        if self._cuda:
            torch.cuda.synchronize()
        for step, place, kind, began, ended in self._laps:
            if step < self._step and (step or not without_first):
                took = began.elapsed_time(ended) if self._cuda else (ended - began) * 1e3
                sums[place, kind][step] += float(took)
        return {key: usual_ms(list(steps.values())) for key, steps in sums.items()}

    @property
    def step_key(self) -> tuple[int, str]:
        """The key of whole steps."""
        return _STEP, "step"

    def _now(self) -> Any:
        if self._cuda:
            event: Any = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
