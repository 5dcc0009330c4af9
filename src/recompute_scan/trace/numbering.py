"""How many events a recording had, by the numbers that the profiler gave them.

Since torch 2.0 the profiler numbers what it recorded on the host from 0 on, Python frames and
instants included (``Ev Idx``, ``torch/csrc/autograd/profiler_kineto.cpp``). A file in which some
of the numbers are missing lost those events; one with more events than numbers has some twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recompute_scan.trace.health import count

_MOST = 2**31


class Numbering:
    """Counts events that have a number.

    Attributes:
        events: How many had one.
        numbers: How many numbers were given out at least: one more than the highest.
    """

    def __init__(self, events: int = 0, numbers: int = 0) -> None:
        self.events = events
        self.numbers = numbers

    def add(self, values: Sequence[Any]) -> None:
        """Take in the numbers of some events, -1 or anything else where there is none."""
        absent = values.count(-1)
        if absent == len(values):
            return
        try:
            highest = max(values)
            odd = min(values) < -1 or highest >= _MOST
        except TypeError:
            odd = True
        if odd:
            values = [n for n in values if isinstance(n, int) and -1 <= n < _MOST]
            absent = values.count(-1)
            highest = max(values, default=-1)
        self.join(len(values) - absent, int(highest) + 1)

    def join(self, events: int, numbers: int = 0) -> None:
        """Take in events that were counted elsewhere."""
        self.events += events
        self.numbers = max(self.numbers, numbers)

    def report(self, health: dict[str, int]) -> None:
        """Count the events that are missing, or there more than once."""
        if not self.numbers or self.events == self.numbers:
            return
        name = "events_missing" if self.events < self.numbers else "events_twice"
        count(health, name, abs(self.numbers - self.events))
        health[f"{name}_of"] = self.numbers
