"""A recording that follows a trainer, and the note that trackers get of it."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Literal

from recompute_scan import trackers
from recompute_scan.api import Scan
from recompute_scan.bundle import pack
from recompute_scan.record.recording import Recording, record

_log = logging.getLogger("recompute_scan.trackers")


class Follower:
    """Records each training that a framework announces.

    Frameworks do not always say that a training has failed, and a trainer may be made that never
    trains. The next recording, a callback's or another, ends what is left of it.

    As soon as all is recorded, rank 0 analyses it and sends the answer to the run's trackers:
    most frameworks close theirs before they announce the end of the training.

    Args:
        steps: As for :func:`recompute_scan.record`, and so are the others.
        warmup: Steps before anything is recorded.
        timing_steps: Steps to time without the profiler.
        folder: Where traces, result and page go; ``None`` for a temporary one.
        device: What to record.
        trackers: Whether trackers in use (W&B, MLflow, TensorBoard, trackio) get the answer.
    """

    def __init__(
        self,
        *,
        steps: int = 5,
        warmup: int = 3,
        timing_steps: int = 10,
        folder: str | os.PathLike[str] | None = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        trackers: bool = True,
    ) -> None:
        super().__init__()
        self._recording: Recording = record(
            steps, warmup=warmup, timing_steps=timing_steps, folder=folder, device=device
        )
        self._trackers = trackers
        self._told = False
        self._made = 0

    @property
    def scan(self) -> Scan:
        """The scan of the recorded steps, when the training is over.

        See :attr:`Recording.scan` for its errors.
        """
        return self._recording.scan

    def _begin(self) -> None:
        """A training is about to begin. Where a framework announces it twice, the first counts."""
        if self._recording.under_way and not self._made:
            return
        self._recording.begin(gives_way=True)
        self._made = 0
        self._told = False

    def _step(self) -> None:
        if self._recording.under_way:
            self._made += 1
            self._recording.step()
            self._tell()

    def _end(self, error: BaseException | None = None) -> None:
        """It has ended, with this error if it failed."""
        self._recording.end(error)
        if error is None:
            self._tell()

    def _tell(self) -> None:
        info = self._recording.info
        if self._told or not self._trackers or not self._recording.done or info is None:
            return
        self._told = True
        if info.rank != 0:
            return
        try:
            if trackers.in_use():
                trackers.tell(note_of(self.scan, self._made))
        except Exception:  # the training goes on
            _log.warning("Trackers got no answer", exc_info=True)


def note_of(scan: Scan, step: int) -> trackers.Note:
    """A note on a scan for trackers; with an alert where checkpointing is doubled or wrong."""
    wrong = [one for one in scan.findings if one.severity == "error"]
    alert = None
    if scan.verdict == "doubled":
        alert = "Activation checkpointing is doubled"
    elif wrong:
        alert = wrong[0].title
    known = {
        "recompute_per_backward": scan.recompute_per_backward,
        "saving_pct": None if scan.cost is None else scan.cost.saving_pct,
    }
    files = {
        "report.html": scan.to_html().encode(),
        "result.json": scan.to_json().encode(),
    }
    return trackers.Note(
        step=step,
        text=scan.headline,
        scalars={name: value for name, value in known.items() if value is not None},
        alert=alert,
        verdict=scan.verdict,
        files=files | _bundled(scan),
    )


def _bundled(scan: Scan) -> dict[str, bytes]:
    """The cleaned archive of its traces, which every command reads, as a file by its name."""
    if not scan.traces:
        return {}
    try:
        with tempfile.TemporaryDirectory(prefix="recompute-scan") as folder:
            archive = Path(folder, "bundle.zip")
            pack(scan.traces, archive)
            return {archive.name: archive.read_bytes()}
    except Exception:  # what is there otherwise is kept all the same
        _log.warning("The traces could not be packed", exc_info=True)
        return {}
