"""Exceptions and other telling lines out of a log, however long, of one process or of many.

Lines of several ranks may be mixed where each says whose it is, as torchrun (``[rank1]:``,
``[default1]:``), srun (``1: ``) and Ray (``(Worker pid=7)``) make them do. Colours are taken
off. Memory does not grow with the log: each different failure is kept once, and only so many.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from msgspec import Struct

from recompute_scan.diagnose.log_lines import (
    RECOMPILATION,
    Ended,
    Launcher,
    is_telling,
    is_warning,
    owner,
)
from recompute_scan.diagnose.tracebacks import Failure, LogStream
from recompute_scan.diagnose.waiting import CollectiveReports, Dumped, Timeout
from recompute_scan.frameworks.signature import Beside

__all__ = ["Failure", "Log", "lines_of", "read_log"]

LONGEST_LINE = 1 << 16
MOST_FAILURES = 100
_MOST_STREAMS = 4096
_RECOMPILATIONS = 64
_LONGEST_NOTE = 2000
# Bytes that are looked through at once.
_BATCH = 1500

# A title or a link of a terminal ends with BEL or with ESC and a backslash.
_COLOUR = re.compile(r"\x1b\[[0-9;?]{0,200}[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")


class Log(Struct, frozen=True):
    """What matters in a log, in the log's order.

    Attributes:
        failures: Exceptions, each different one once.
        lines: Other telling lines, such as warnings.
        timeouts: Collectives that NCCL's watchdog gave up.
        dumped: What torch's own comparison of the ranks says.
        first_rank: The rank that torchrun saw fail first.
        ended: The process that a launcher saw end first, where a signal ended it.
        read: Number of lines.
    """

    failures: tuple[Failure, ...]
    lines: tuple[Beside, ...] = ()
    timeouts: tuple[Timeout, ...] = ()
    dumped: tuple[Dumped, ...] = ()
    first_rank: int | None = None
    ended: Ended | None = None
    read: int = 0


def read_log(lines: Iterable[bytes]) -> Log:
    """What matters in the log with these lines."""
    reader = _LogReader()
    some: list[bytes] = []
    size = 0
    for line in lines:
        some.append(line)
        size += len(line)
        if size >= _BATCH:
            reader.read_some(some)
            some, size = [], 0
    reader.read_some(some)
    return reader.finish()


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a binary file; one longer than the limit comes in pieces."""
    while line := file.readline(LONGEST_LINE):
        yield line


class _LogReader:
    def __init__(self) -> None:
        self._streams: dict[str, LogStream] = {}
        self._busy = 0
        self._listens = False
        self._failures: dict[object, Failure] = {}
        self._lines: dict[str, Beside] = {}
        # There may be any number of them, and what counts stands shortly before a failure.
        self._recompilations: deque[Beside] = deque(maxlen=_RECOMPILATIONS)
        self._collectives = CollectiveReports()
        self._launcher = Launcher()
        self._number = 0

    def read_some(self, lines: list[bytes]) -> None:
        """Take in these lines; most of a log tells nothing, and is passed over together."""
        if not self._listens and not is_telling(b"".join(lines)):
            self._number += len(lines)
            return
        for line in lines:
            self._number += 1
            self._read(self._number, line)

    def _read(self, number: int, raw: bytes) -> None:
        if not self._listens and not is_telling(raw):
            return
        text = raw.decode("utf-8", errors="replace").rstrip("\r\n")
        if "\x1b" in text:
            text = _COLOUR.sub("", text)
        key, rank, stamped, bare = owner(text)
        self._collectives.read(number, text, rank)
        self._launcher.read(number, bare)
        self._note(Beside(number, text.strip()[:_LONGEST_NOTE], rank))
        stream = self._streams.get(key)
        if stream is None:
            if len(self._streams) >= _MOST_STREAMS:
                return
            stream = self._streams[key] = LogStream(key, rank, self._keep)
        before = stream.busy
        stream.feed(number, bare, stamped=stamped)
        self._busy += stream.busy - before
        self._listens = bool(self._busy) or self._launcher.listens or self._collectives.listens

    def _note(self, line: Beside) -> None:
        """Keep a line that may matter for a failure after it."""
        if is_warning(line.text) and len(self._lines) < MOST_FAILURES:
            self._lines.setdefault(line.text, line)
        elif RECOMPILATION.search(line.text):
            self._recompilations.append(line)

    def finish(self) -> Log:
        for stream in self._streams.values():
            stream.end()
        return Log(
            failures=tuple(sorted(self._failures.values(), key=lambda one: one.line)),
            lines=tuple(self._lines.values()),
            timeouts=self._collectives.timeouts,
            dumped=self._collectives.dumped,
            first_rank=self._launcher.first_rank,
            ended=self._launcher.ended,
            read=self._number,
        )

    def _keep(self, failure: Failure) -> None:
        last = failure.errors[-1]
        places = tuple((frame.file, frame.line) for frame in last.frames[-3:])
        key = (failure.rank, last.type, last.message[:2000], places)
        if len(self._failures) < MOST_FAILURES and key not in self._failures:
            self._failures[key] = failure
            for line in self._recompilations:
                self._lines[f"{line.number}: {line.text}"] = line
