"""A small job broken in every way that jobs break: what was reported, and what was kept.

  python -m benchmarks faults kill         the faults whose name holds a word
  python -m benchmarks faults profiled     early ends in profiled steps

The status is 1 where a status, a report or what was kept is not what it should be.
"""

import os
import sys
from collections.abc import Sequence

from tests.record.faults import EARLY, FAULTS, break_job

from benchmarks._frame import Table, benchmark, wanted, words
from benchmarks._machine import machine


@benchmark
@words()
def main(words: Sequence[str]) -> int:
    print(f"{machine('torch')}\n")
    heads = ("what was broken", "status", "what was reported", "traces", "step times", "result")
    table = Table(dict.fromkeys(heads, "<"), markdown=True)
    right = tried = 0
    for one in (*FAULTS, *EARLY):
        if not wanted(one.name, words):
            continue
        if one.mount is not None and os.geteuid() != 0:
            table.row(one.name, *[""] * 4, "not at hand: a mount needs root")
            continue
        wrong, cells = break_job(one)
        right, tried = right + (not wrong), tried + 1
        table.row(one.name, *cells, "WRONG" if wrong else "right")
        if wrong:
            print(wrong, file=sys.stderr)
    print(f"\n{right} of {tried} right")
    return int(right < tried or not tried)
