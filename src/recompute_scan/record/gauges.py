"""All that is measured for ``--verify`` beside the step times."""

from __future__ import annotations

import random
import sys

import torch

from recompute_scan.record.guard import Guard
from recompute_scan.record.launch import rank_facts
from recompute_scan.record.losses import LossWatch
from recompute_scan.record.memory import PeakMemory
from recompute_scan.run_info import Measurements

# Any number that no script is likely to choose for itself.
_SEED = 1_919_247_219


class Gauges:
    """Losses, memory, and the same seeds at the start of every run.

    Attributes:
        memory: To be told when the timed steps begin and end.
    """

    def __init__(self, guard: Guard | None = None) -> None:
        self.memory = PeakMemory()
        self._losses = LossWatch(guard)
        self._seed = _SEED + rank_facts().rank

    def install(self) -> None:
        """Seed Python, NumPy and torch, and begin to watch; before the script is imported."""
        random.seed(self._seed)
        numpy = sys.modules.get("numpy")  # torch brings it, where it is there
        if numpy is not None:
            numpy.random.seed(self._seed)
        torch.manual_seed(self._seed)
        self._losses.install()

    def remove(self) -> None:
        """Stop watching."""
        self._losses.remove()

    def measurements(self, bypassed_calls: int) -> Measurements:
        """What was measured; waits for the GPU."""
        peaks = self.memory.peaks
        return Measurements(
            losses=self._losses.values(),
            seeded=torch.initial_seed() != self._seed,
            bypassed_calls=bypassed_calls,
            peak_allocated_bytes=peaks.allocated,
            peak_reserved_bytes=peaks.reserved,
            peak_rss_bytes=peaks.rss,
        )
