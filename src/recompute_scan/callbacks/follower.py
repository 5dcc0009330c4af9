"""What all callbacks share: a recording that follows one training after another."""

from __future__ import annotations

from typing import Any

from recompute_scan.api import Scan
from recompute_scan.record.recording import Recording, record


class Follower:
    """Records each training that it is told of; ``options`` are those of :func:`record`.

    Frameworks do not always say that a training has failed, and a trainer may be made that never
    trains. The next recording, a callback's or another, ends what is left of it.
    """

    def __init__(self, **options: Any) -> None:
        self._recording: Recording = record(**options)
        self._steps = 0

    @property
    def scan(self) -> Scan:
        """What the recorded steps show; see :attr:`Recording.scan` for what it raises."""
        return self._recording.scan

    def begin(self) -> None:
        """A training is about to begin. Of one that is told of twice, the first time counts."""
        if self._recording.under_way and not self._steps:
            return
        self._recording.begin(gives_way=True)
        self._steps = 0

    def step(self) -> None:
        """A step of it has ended."""
        if self._recording.under_way:
            self._steps += 1
            self._recording.step()

    def end(self, error: BaseException | None = None) -> None:
        """It has ended, with this error if it failed."""
        self._recording.end(error)
