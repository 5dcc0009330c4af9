"""A tracker for loops with an ``Accelerator``, which log their steps."""

from __future__ import annotations

from typing import Any

from accelerate.tracking import GeneralTracker

from recompute_scan.integrations.follower import Follower


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
