"""The fix in one step and not in the next, in one process."""

from __future__ import annotations

import torch

from recompute_scan.record.bypass import Bypass
from recompute_scan.record.recorder import Recorder
from recompute_scan.run_info import step_has_fix


class Alternation:
    """Switches a bypass on and off at step boundaries, in the same steps on every rank.

    Timed steps are counted from 0, as :func:`recompute_scan.run_info.step_has_fix` wants them. The
    warm-up has negative numbers, so that both ways have been seen before any is timed; behind the
    timed steps, or where a rank cannot go on timing, the count goes on.
    """

    def __init__(self, bypass: Bypass, recorder: Recorder, warmup: int) -> None:
        self._bypass = bypass
        self._recorder = recorder
        self._number = -warmup
        self._bypass.active = step_has_fix(self._number)

    def settle(self) -> None:
        """A step has ended: let the GPU end it too.

        Where the host runs ahead of it, what it gained in a step of the one way would shorten one
        of the other.
        """
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def next(self) -> None:
        """The recorder has passed the boundary: the next step begins."""
        timed = self._recorder.timed
        self._number = self._number + 1 if timed is None else timed
        self._bypass.active = step_has_fix(self._number)
