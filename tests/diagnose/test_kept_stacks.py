"""A rank's stacks are kept when a launcher ends it after it had told that it hangs."""

import signal
from pathlib import Path

from tests.record.runs import run_plain

CODE = """
import os, signal, sys
from pathlib import Path
from recompute_scan.record.watchdog import Watchdog
from recompute_scan.record.launch import rank_facts

watchdog = Watchdog(Path(sys.argv[1]), 0, lambda: 0, lambda end: None)
watchdog.start()

def hangs_here():
    watchdog._write_stacks(rank_facts())

def is_ended_here():
    os.kill(os.getpid(), signal.SIGTERM)

hangs_here()
is_ended_here()
"""


def test_what_was_told_of_a_hang_outlives_the_end_by_a_launcher(tmp_path: Path) -> None:
    rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    ended = run_plain(tmp_path, "-c", CODE, tmp_path, **rank)
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    kept = (tmp_path / "where-rank1.txt").read_text(encoding="utf-8")
    assert "in hangs_here" in kept
    assert "in is_ended_here" in kept
    assert kept.index("in hangs_here") < kept.index("in is_ended_here")
