"""Twice as large an input takes about twice as long, and none of 5 MB takes 300 MB."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.effort import some
from tests.fuzz.shapes import SHAPES, count_for, read
from tests.fuzz.wider import wider_files, wider_logs, wider_texts, wider_traces

# Of an input four times as large: 4 where time is linear, 16 where it is quadratic.
MOST = 8
# What so little is of time says nothing.
FLOOR_S = 0.05
SMALL, LARGE = 250_000, 5_000_000


# Threads by the thousand, damage in every event, an analysis for each member: milliseconds each.
LONG = {"packets of threads", "threads", "closed amid", "raw backslashes", "keys", "config of keys"}
LONG |= {"processes", "archive of members", "lint of ifs"}
WIDER = {*wider_files(), *wider_logs(), *wider_texts(), *wider_traces()}
SOME = [*some([one for one in SHAPES if one not in WIDER], 2), *some(sorted(WIDER), 4)]


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one in LONG)) for one in SOME]
)
def test_time_grows_no_faster_than_the_input(name: str) -> None:
    make = SHAPES[name][0]
    count = count_for(make, SMALL)
    took = []
    for factor in (1, 4):
        data = make(factor * count)
        took.append(min(_seconds(name, data) for _ in range(2)))
    assert took[1] < MOST * max(took[0], FLOOR_S), took


def _seconds(name: str, data: bytes) -> float:
    start = time.process_time()
    read(name, data)
    return time.process_time() - start


# Where configurations are read, torch is loaded: it takes most of that itself.
@pytest.mark.slow
@pytest.mark.parametrize("name", [one for one in SHAPES if not one.startswith("config")])
def test_memory_stays_below_300_mb(name: str) -> None:
    command = [sys.executable, "-m", "tests.fuzz.shapes", name, str(LARGE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) < 300 << 20
