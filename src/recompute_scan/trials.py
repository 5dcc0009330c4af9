"""One run of a script among several that are compared, and how it ended."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from msgspec import Struct

from recompute_scan.faithful import Sampled
from recompute_scan.result import Result
from recompute_scan.run_info import Measurements, RunInfo, step_has_fix

_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|MemoryError|can't allocate memory", re.I
)
_KILLED = 137  # by SIGKILL, which is how Linux takes back memory


class Trial(Struct, frozen=True):
    """One run of the script.

    Attributes:
        records: What its ranks left, rank 0 first; empty where none did.
        exit_status: Of the script, or of what started it.
        result: What its trace showed, where it recorded one.
        gradients: Of its first step, on rank 0; empty where they were not seen.
    """

    records: tuple[RunInfo, ...]
    exit_status: int = 0
    result: Result | None = None
    gradients: tuple[Sampled, ...] = ()

    @property
    def measured(self) -> list[Measurements]:
        """What each rank measured."""
        return [info.measured for info in self.records if info.measured is not None]

    @property
    def timed_ms(self) -> tuple[float, ...]:
        """Rank 0's timed steps. Ranks wait for one another in every step."""
        return self.records[0].timed_steps_ms if self.records else ()

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """Of a run that switched the fix on and off: neighbouring steps, unchanged and with it."""
        times = self.timed_ms
        return [
            (times[at + 1], times[at]) if step_has_fix(at) else (times[at], times[at + 1])
            for at in range(0, len(times) - 1, 2)
        ]

    @property
    def came_through(self) -> bool:
        """Whether the script ended well and steps were timed."""
        return self.exit_status == 0 and bool(self.timed_ms) and bool(self.measured)


def ran_out(trial: Trial) -> bool:
    """Whether it ended for want of memory, as far as what it left tells."""
    said = [info.message for info in trial.records if info.message]
    return trial.exit_status == _KILLED or any(_OUT_OF_MEMORY.search(text) for text in said)


def message(trial: Trial) -> str:
    """What it ended with, in one sentence."""
    said = [info.message for info in trial.records if info.message]
    return said[0] if said else f"It ended with exit status {trial.exit_status}."


def most(trials: Sequence[Trial], value: Callable[[Measurements], int | None]) -> int | None:
    """The largest value over all ranks of these runs; ``None`` where none is known."""
    found = [value(measured) for trial in trials for measured in trial.measured]
    return max((number for number in found if number is not None), default=None)
