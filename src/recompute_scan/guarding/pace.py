"""Step time and memory, so that a change can say what departed together with it."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from pathlib import Path

import torch

_KEPT = 64


class Pace:
    """The latest step times, on the clock of the process, and the memory at the last look."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_KEPT)
        self._last: float | None = None
        self._memory: int | None = None

    def step(self) -> None:
        """A step has ended."""
        now = time.perf_counter()
        if self._last is not None:
            self._times.append(now - self._last)
        self._last = now

    @property
    def usual_s(self) -> float | None:
        """Median of the latest step times in s."""
        return statistics.median(self._times) if self._times else None

    def look_at_memory(self) -> None:
        """Keep what is in use now."""
        self._memory = _in_use()

    def slower(self, steps: int) -> float | None:
        """Median time of the last steps over that of those before; ``None`` with too few."""
        times = list(self._times)
        since, before = times[-steps:], times[:-steps]
        if len(since) < steps or len(before) < steps:
            return None
        return statistics.median(since) / statistics.median(before)

    def memory(self) -> float | None:
        """Memory in use over that at the last look; ``None`` where it is not known."""
        now = _in_use()
        return now / self._memory if now and self._memory else None


def _in_use() -> int | None:
    """Bytes: torch's highest use of the GPU, else what the process holds in memory."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return int(torch.cuda.max_memory_allocated())
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * int(os.sysconf("SC_PAGE_SIZE"))
