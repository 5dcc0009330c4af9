"""Twice as large an input takes about twice as long, and none of 5 MB takes 300 MB."""

import functools
import math
import subprocess
import sys
import time

import pytest

from tests.effort import some
from tests.fuzz.shapes import SHAPES, count_for, read

# Of an input four times as large: 4 where time is linear, 16 where it is quadratic.
MOST = 8
# What so little is of time says nothing.
FLOOR_S = 0.05
ATTEMPTS = 4
SMALL, LARGE = 250_000, 5_000_000


# Threads by the thousand, damage in every event, an analysis for each member: milliseconds each.
LONG = {"packets of threads", "threads", "closed amid", "raw backslashes", "keys", "config of keys"}
LONG |= {"processes", "archive of members", "lint of ifs"}
SOME = some(SHAPES, 3)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one in LONG)) for one in SOME]
)
def test_time_grows_no_faster_than_the_input(name: str) -> None:
    make = SHAPES[name][0]
    count = count_for(make, SMALL)
    small, large = make(count), make(4 * count)
    took = [math.inf, math.inf]
    # What else the machine does makes one measurement longer, never all of them shorter.
    for attempt in range(ATTEMPTS):
        took = [min(took[0], _seconds(name, small)), min(took[1], _seconds(name, large))]
        # A further look at so short a time could change nothing.
        if took[1] < MOST * (max(took[0], FLOOR_S) if attempt else FLOOR_S):
            return
    pytest.fail(f"{took[0]:.3f} s, and {took[1]:.3f} s of an input four times as large")


def _seconds(name: str, data: bytes) -> float:
    _forget()
    start = time.process_time()
    read(name, data)
    return time.process_time() - start


def _forget() -> None:
    """Empty our caches: the few names of the smaller input fit in, those of the larger do not."""
    ours = [module for name, module in sys.modules.items() if name.startswith("recompute_scan")]
    for module in ours:
        for function in vars(module).values():
            if isinstance(function, functools._lru_cache_wrapper):
                function.cache_clear()


# Where configurations are read, torch is loaded: it takes most of that itself.
@pytest.mark.slow
@pytest.mark.parametrize("name", [one for one in SHAPES if not one.startswith("config")])
def test_memory_stays_below_300_mb(name: str) -> None:
    command = [sys.executable, "-m", "tests.fuzz.shapes", name, str(LARGE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) < 300 << 20
