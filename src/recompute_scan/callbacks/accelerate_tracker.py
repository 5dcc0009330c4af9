"""For loops with an ``Accelerator``: a tracker, which is told of steps as they are logged."""

from __future__ import annotations

from typing import Any

from accelerate.tracking import GeneralTracker

from recompute_scan.api import Scan
from recompute_scan.callbacks.follower import Follower


class AccelerateTracker(GeneralTracker):
    """Records the first steps: ``Accelerator(log_with=[tracker])``, then ``init_trackers(…)``.

    A step ends with each ``accelerator.log(…, step=n)`` of another ``n``, or each ``log`` without
    one: log once per step, at its end. ``accelerator.end_training()`` ends the recording. Make the
    model after ``init_trackers``, so that the lines that switch checkpointing on are seen.

    Args:
        options: Those of :func:`recompute_scan.record`: ``steps``, ``folder`` and so on.
    """

    name = "recompute_scan"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._follower = Follower(**options)
        self._logged: int | None = None

    @property
    def tracker(self) -> AccelerateTracker:
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
