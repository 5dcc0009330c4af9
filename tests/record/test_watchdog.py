"""A rank that is being ended because it hangs is not overtaken by its own main thread."""

import threading
import time
from pathlib import Path

from recompute_scan.crash import RankEnd
from recompute_scan.record.watchdog import Watchdog


def test_what_wakes_up_while_its_process_leaves_waits_for_that(tmp_path: Path) -> None:
    """As when another rank has left already, which ends the collective that this one waits in."""
    closed, left = threading.Event(), threading.Event()

    def leave(_: RankEnd) -> None:
        closed.set()
        time.sleep(0.5)
        left.set()

    watchdog = Watchdog(tmp_path, 0.2, lambda: 0, leave)
    watchdog.start()
    assert closed.wait(60)
    watchdog.let_leave()
    assert left.is_set()
    watchdog.let_leave()  # nothing is left to wait for
    watchdog.stop()
