"""For loops with an ``Accelerator``: a tracker, which is told of steps as they are logged."""

from __future__ import annotations

import os
from typing import Any, Literal

from accelerate.tracking import GeneralTracker

from recompute_scan.api import Scan
from recompute_scan.callbacks.follower import Follower


class RecomputeScanTracker(GeneralTracker):
    """Records the first steps: ``Accelerator(log_with=[tracker])``, then ``init_trackers(…)``.

    A step ends with each ``accelerator.log(…, step=n)`` of another ``n``, or each ``log`` without
    one: log once per step, at its end. ``accelerator.end_training()`` ends the recording. Make the
    model after ``init_trackers``, so that the lines that switch checkpointing on are seen.

    Args:
        steps: As those of :func:`recompute_scan.record`, like what follows.
        warmup: Steps before anything is recorded.
        timing_steps: Steps to time without the profiler.
        folder: Where traces, result and page go; ``None`` for a temporary one.
        device: What to record.
        trackers: Whether trackers in use (W&B, MLflow, TensorBoard) are told the answer.
    """

    name = "recompute_scan"
    requires_logging_directory = False
    main_process_only = False

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
        self._follower = Follower(
            steps=steps,
            warmup=warmup,
            timing_steps=timing_steps,
            folder=folder,
            device=device,
            trackers=trackers,
        )
        self._logged: int | None = None

    @property
    def tracker(self) -> RecomputeScanTracker:
        """What ``accelerator.get_tracker("recompute_scan", unwrap=True)`` gives."""
        return self

    @property
    def scan(self) -> Scan:
        """What the recorded steps show, when the training is over."""
        return self._follower.scan

    def start(self) -> None:
        """``init_trackers`` was called."""
        self._logged = None
        self._follower.begin()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The same, in versions that do not call :meth:`start`; the values are not looked at."""
        self._follower.begin()

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Something was logged; the values are not looked at."""
        if step is None or step != self._logged:
            self._logged = step
            self._follower.step()

    def finish(self) -> None:
        """``end_training`` was called."""
        self._follower.end()
