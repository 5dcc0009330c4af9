"""The folder of a recording from inside a training loop, and what its traces show."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.api import Scan
from recompute_scan.errors import RunError
from recompute_scan.record.launch.launcher import wait_for_ranks
from recompute_scan.record.run_folder import beside, take_place, write_report
from recompute_scan.run_info import RunInfo

# How long rank 0 waits for the run records of the others, which end with the same step.
_RANKS_TIMEOUT_S = 30.0
_POLL_S = 0.1


class Home:
    """The folder of a recording; one of our own is deleted when nobody needs it any more."""

    def __init__(self, folder: Path | None) -> None:
        self.lasting = folder is not None
        self._earlier: Path | None = None
        if folder is None:
            self.path = Path(tempfile.mkdtemp(prefix="recompute-scan-"))
        else:  # absolute, because the loop may change the current directory
            self.path, self._earlier = beside(folder.absolute())
        if not self.lasting:
            weakref.finalize(self, _delete, self.path, os.getpid())

    def scan(self, info: RunInfo) -> Scan:
        """What the recorded steps show, once this rank's run record is written.

        Raises:
            RunError: There is no trace (``E309``); the second line says why.
        """
        if self._earlier is not None and info.rank:
            self._follow_rank_0(self._earlier)
        elif self.lasting and info.world_size > 1:
            wait_for_ranks(self.path, info.world_size, _RANKS_TIMEOUT_S)
        elif info.trace is None and info.end is None:
            why = " ".join(filter(None, (info.message, *info.warnings)))
            if not info.chosen:
                why = f"of {info.world_size} ranks, rank {info.rank} was not one to be recorded"
            raise RunError("E309", "The recording gave no trace.", why=why)
        result = analyse([self.path])
        if self.lasting and info.rank == 0:
            write_report(self.path, result)
            if self._earlier is not None and info.exit_status == 0:
                take_place(self.path, self._earlier)
                self.path, self._earlier = self._earlier, None
        return Scan(result, (str(self.path),), keeps=self)

    def _follow_rank_0(self, earlier: Path) -> None:
        """Wait until it has put what was recorded in the place of an earlier result."""
        deadline = time.monotonic() + _RANKS_TIMEOUT_S
        while self.path.exists() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if not self.path.exists():
            self.path = earlier


def _delete(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a forked child, which has it too
        shutil.rmtree(folder, ignore_errors=True)
