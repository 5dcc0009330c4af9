"""Callbacks for transformers and Lightning, and a tracker for Accelerate.

The first is for the Trainer of transformers, and of trl, axolotl and others that build on it; the
second for Lightning's, by either of its names. The tracker serves loops with an ``Accelerator``,
which log their steps.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

from accelerate.tracking import GeneralTracker
from transformers import TrainerCallback

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


class RecomputeScanCallback(Follower, TrainerCallback):
    """Records the first steps of each ``train()``: ``Trainer(…, callbacks=[callback])``.

    A step is an optimizer step, whatever ``gradient_accumulation_steps`` is. Given to the Trainer
    when that is made, it sees which line switches checkpointing on.
    Arguments as of :class:`Follower`.
    """

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """The Trainer is there, and checkpointing not yet on."""
        self._begin()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """For callbacks that were added later, and for a second ``train()``."""
        self._begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._end()


def _base() -> Any:
    """The ``Callback`` of the package that the script uses; both may be installed."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    names.sort(key=lambda name: name not in sys.modules)
    try:
        return importlib.import_module(names[0]).Callback
    except ModuleNotFoundError as error:
        if error.name != names[0].partition(".")[0]:
            raise
    return importlib.import_module(names[1]).Callback


_Callback: Any = _base()


class RecomputeScanLightningCallback(Follower, _Callback):
    """Records the first steps of each ``fit()``: ``Trainer(callbacks=[callback])``.

    A step is an optimizer step, whatever ``accumulate_grad_batches`` is; of several optimizers in
    one batch, their steps together.
    Arguments as of :class:`Follower`.
    """

    _global_step = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The strategy has not wrapped the model yet."""
        if stage == "fit":
            self._begin()
            self._global_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """A batch is over; was it the last one of a step?"""
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self._step()

    def on_train_end(self, *_: Any) -> None:
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end(exception)


class RecomputeScanTracker(Follower, GeneralTracker):
    """Records the first steps: ``Accelerator(log_with=[tracker])``, then ``init_trackers(…)``.

    A step ends with each ``accelerator.log(…, step=n)`` of another ``n``, or each ``log`` without
    one: log once per step, at its end. ``accelerator.end_training()`` ends the recording. Make the
    model after ``init_trackers``, so that the lines that switch checkpointing on are seen.
    Arguments as of :class:`Follower`.
    """

    name = "recompute_scan"
    requires_logging_directory = False
    main_process_only = False

    _logged: int | None = None

    @property
    def tracker(self) -> RecomputeScanTracker:
        """The tracker that ``accelerator.get_tracker("recompute_scan", unwrap=True)`` returns."""
        return self

    def start(self) -> None:
        self._logged = None
        self._begin()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The same, in versions that do not call :meth:`start`; the values are not looked at."""
        self._begin()

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Something was logged; the values are not looked at."""
        if step is None or step != self._logged:
            self._logged = step
            self._step()

    def finish(self) -> None:
        self._end()
