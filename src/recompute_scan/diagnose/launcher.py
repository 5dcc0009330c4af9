"""How launchers say that a process ended: torchrun, torch's older ones, DeepSpeed's, an IDE's."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

_FAILED = re.compile(
    r"failed \(exitcode: (?P<status>-?\d+)\) local_rank: (?P<rank>\d+)"
    r"|died with <Signals\.(?P<signal>SIG\w+): \d+>"
    r"|exits with return code = (?P<code>-\d+)"
    r"|ProcessExitedException: process \d+ terminated with signal (?P<spawned>SIG\w+)"
    r"|finished with exit code \d+ \(interrupted by signal \d+:? (?P<ide>SIG\w+)\)"
)
_ROOT = re.compile(r"Root Cause \(first observed failure\)")
_RANK = re.compile(r"^\s*rank\s*:\s*(?P<rank>\d+) ")
_STATUS = re.compile(r"^\s*exitcode\s*:\s*(?P<status>-?\d+) ")


@dataclass(frozen=True)
class Ended:
    """The process that a launcher saw end first, by a signal.

    Attributes:
        signal: Its name, such as ``SIGKILL``.
        line: 1-based number of the line that says so.
        text: That line.
    """

    signal: str
    line: int
    text: str


class Launcher:
    """What launchers say, line by line: the rank that failed first, and by which signal."""

    def __init__(self) -> None:
        self.first_rank: int | None = None
        self.ended: Ended | None = None
        self._said = False
        self._in_summary = False

    @property
    def listens(self) -> bool:
        """Whether the lines of a summary are still to come."""
        return self._in_summary

    def read(self, number: int, text: str) -> None:
        """Take in one line."""
        if _ROOT.search(text):
            self._in_summary = True
            return
        if self._in_summary:
            self._summary(number, text)
            return
        if not self._said and (match := _FAILED.search(text)) is not None:
            status = match["status"] or match["code"]
            named = match["signal"] or match["spawned"] or match["ide"]
            self._note(number, text, named or _name(int(status or 0)))

    def _summary(self, number: int, text: str) -> None:
        if self.first_rank is None and (match := _RANK.match(text)) is not None:
            self.first_rank = int(match["rank"])
        elif (match := _STATUS.match(text)) is not None:
            self._in_summary = False
            # The summary knows which one was first; a line before it may speak of another.
            self._note(number, text, _name(int(match["status"])))

    def _note(self, number: int, text: str, name: str | None) -> None:
        self._said = True
        self.ended = Ended(name, number, text.strip()[:300]) if name is not None else None


def _name(status: int) -> str | None:
    try:
        return signal.Signals(-status).name if status < 0 else None
    except ValueError:
        return None
