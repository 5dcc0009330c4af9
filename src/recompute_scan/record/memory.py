"""The most memory that the timed steps needed."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"  # proc(5): "Writing 5 resets the peak resident set size"


@dataclass(frozen=True)
class Peaks:
    """Bytes: what torch allocated and reserved on the GPU, and what the process had resident."""

    allocated: int | None = None
    reserved: int | None = None
    rss: int | None = None


class PeakMemory:
    """Peaks from :meth:`begin` to :meth:`end`. Resets torch's own peak counters."""

    def __init__(self) -> None:
        self._cuda = False
        self.peaks = Peaks()

    def begin(self, device: Literal["cpu", "cuda"]) -> None:
        """Forget the peaks so far."""
        self._cuda = device == "cuda"
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        with suppress(OSError):  # no Linux, or not allowed: the peak of the whole run then
            _CLEAR.write_text(_FORGET_PEAK)

    def end(self) -> None:
        """Read the peaks."""
        allocated = reserved = None
        if self._cuda:
            allocated = torch.cuda.max_memory_allocated()
            reserved = torch.cuda.max_memory_reserved()
        self.peaks = Peaks(allocated, reserved, _peak_rss())


def _peak_rss() -> int | None:
    with suppress(OSError):
        found = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    return None
