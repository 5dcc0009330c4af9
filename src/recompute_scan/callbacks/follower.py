"""What all callbacks share: a recording that follows one training after another."""

from __future__ import annotations

from typing import Any

from recompute_scan.record.recording import Recording, record
from recompute_scan.scan import Scan

_following: Follower | None = None


class Follower:
    """Records each training that it is told of; ``options`` are those of :func:`record`.

    Frameworks do not always say that a training has failed. The next one that begins, with
    whatever callback, ends what is left of it.
    """

    def __init__(self, **options: Any) -> None:
        self._recording: Recording = record(**options)
        self._under_way = False
        self._steps = 0

    @property
    def scan(self) -> Scan:
        """What the recorded steps show; see :attr:`Recording.scan` for what it raises."""
        return self._recording.scan

    def begin(self) -> None:
        """A training is about to begin. Of one that is told of twice, the first time counts."""
        global _following
        if self._under_way and not self._steps:
            return
        if _following is not None:
            _following.end(RuntimeError("the training did not say that it ended"))
        self._recording.begin()
        self._steps, self._under_way = 0, True
        _following = self

    def step(self) -> None:
        """A step of it has ended."""
        if self._under_way:
            self._steps += 1
            self._recording.step()

    def end(self, error: BaseException | None = None) -> None:
        """It has ended, with this error if it failed."""
        global _following
        if self._under_way:
            self._under_way = False
            _following = None
            self._recording.end(error)
