"""Exceptions and other telling lines out of a log, however long, of one process or of many.

Lines of several ranks may be mixed where each says whose it is, as torchrun (``[rank1]:``,
``[default1]:``), srun (``1: ``) and Ray (``(Worker pid=7)``) make them do. Colours are taken
off. Memory does not grow with the log: each different failure is kept once, and only so many.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from recompute_scan.crash import Frame, Raised
from recompute_scan.diagnose.log_lines import (
    HEADER,
    TYPED,
    is_telling,
    is_warning,
    owner,
    worth_a_stream,
)

LONGEST_LINE = 1 << 16
MOST_FAILURES = 100
_MOST_FRAMES = 400
_MOST_CONTINUED = 60
_SAVING_WITHIN = 400

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+?))?\s*$'
)
_RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]*\w)(?:: ?(?P<message>.*))?$")
_CHAIN = re.compile(
    r"The above exception was the direct cause of the following exception"
    r"|During handling of the above exception, another exception occurred"
)
_NEW_RECORD = re.compile(
    r"^(?:\d{4}-\d\d-\d\d[ T]|[EWIF]\d{4} \d\d:|=====|\[\d{4}-|\[[EW]\d{3,4} "
    r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b)"
)
_WATCHDOG = re.compile(
    r"\[(?:PG [^\]]*)?Rank (?P<rank>\d+)\].*?Watchdog caught collective operation timeout: "
    r"WorkNCCL\((?P<work>[^)]*(?:\(ms\)[^)]*)?)\)"
)
_FIRST_FAILURE = re.compile(r"Root Cause \(first observed failure\)")
_SUMMARY_RANK = re.compile(r"^\s*rank\s*:\s*(\d+) ")
_SAVING = re.compile(
    r"\bsav(?:e|ing|ed)\b.{0,40}\b(?:checkpoint|model|state|weights|optimizer)"
    r"|\b(?:checkpoint|model|state)\w*\b.{0,20}\bsav(?:e|ing)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """One uncaught exception, or what looks like one.

    Attributes:
        rank: Whose, as the log says; ``None`` where it does not.
        line: 1-based number of the line that names the exception.
        errors: The exceptions of the chain, the first raised first.
    """

    rank: int | None
    line: int
    errors: tuple[Raised, ...]


@dataclass(frozen=True)
class Timeout:
    """A collective that NCCL's watchdog gave up: whose, and what it says of the work."""

    rank: int
    line: int
    operation: str
    sequence: int | None
    elements: int | None


@dataclass(frozen=True)
class Log:
    """What matters in a log, in the log's order.

    Attributes:
        failures: Exceptions, each different one once.
        lines: Other telling lines with their numbers, such as warnings.
        timeouts: Collectives that were given up, one a rank.
        first_rank: The rank that torchrun saw fail first.
        saving: The last line before the first timeout that speaks of saving.
        read: Number of lines.
    """

    failures: tuple[Failure, ...]
    lines: tuple[tuple[int, str], ...] = ()
    timeouts: tuple[Timeout, ...] = ()
    first_rank: int | None = None
    saving: tuple[int, str] | None = None
    read: int = 0


def read_log(lines: Iterable[bytes]) -> Log:
    """What matters in the log with these lines."""
    reader = _Reader()
    for number, line in enumerate(lines, start=1):
        reader.read(number, line)
    return reader.finish()


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a binary file; one longer than the limit comes in pieces."""
    while line := file.readline(LONGEST_LINE):
        yield line


@dataclass
class _Stream:
    """One rank's lines: an exception that is being read, and those before it in its chain."""

    rank: int | None
    reading: bool = False
    indent: int = 0
    frames: list[Frame] = field(default_factory=list)
    chain: list[Raised] = field(default_factory=list)
    type: str | None = None
    message: list[str] = field(default_factory=list)
    line: int = 0
    chained: bool = False


class _Reader:
    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self._busy = 0
        self._failures: dict[object, Failure] = {}
        self._lines: dict[str, int] = {}
        self._timeouts: dict[int, Timeout] = {}
        self._first_rank: int | None = None
        self._await_rank = False
        self._saving: tuple[int, str] | None = None
        self._number = 0

    def read(self, number: int, raw: bytes) -> None:
        self._number = number
        if not self._busy and not self._await_rank and not is_telling(raw):
            return
        text = raw.decode("utf-8", errors="replace").rstrip("\r\n")
        if "\x1b" in text:
            text = _COLOUR.sub("", text)
        self._notice(number, text)
        key, rank, text = owner(text)
        stream = self._streams.get(key)
        if stream is None:
            if not worth_a_stream(text):
                return
            stream = self._streams[key] = _Stream(rank)
        before = self._is_busy(stream)
        self._feed(stream, number, text)
        self._busy += self._is_busy(stream) - before

    def finish(self) -> Log:
        for stream in self._streams.values():
            self._end(stream)
        saving = self._saving
        first = min((one.line for one in self._timeouts.values()), default=None)
        if saving is not None and (first is None or not 0 <= first - saving[0] <= _SAVING_WITHIN):
            saving = None
        return Log(
            failures=tuple(sorted(self._failures.values(), key=lambda one: one.line)),
            lines=tuple((number, line) for line, number in self._lines.items()),
            timeouts=tuple(sorted(self._timeouts.values(), key=lambda one: one.rank)),
            first_rank=self._first_rank,
            saving=saving,
            read=self._number,
        )

    @staticmethod
    def _is_busy(stream: _Stream) -> bool:
        return stream.reading or stream.type is not None or stream.chained

    def _notice(self, number: int, text: str) -> None:
        """What single lines say, whosever they are."""
        if (match := _WATCHDOG.search(text)) is not None:
            rank = int(match["rank"])
            if rank not in self._timeouts:
                self._timeouts[rank] = _timeout(rank, number, match["work"])
            return
        if _FIRST_FAILURE.search(text):
            self._await_rank = True
        elif self._await_rank and (found := _SUMMARY_RANK.match(owner(text)[2])) is not None:
            self._first_rank = self._first_rank if self._first_rank is not None else int(found[1])
            self._await_rank = False
        if not self._timeouts and _SAVING.search(text) and not text.lstrip().startswith("File "):
            self._saving = (number, text.strip()[:200])
        if is_warning(text) and len(self._lines) < MOST_FAILURES:
            self._lines.setdefault(text.strip()[:2000], number)

    def _feed(self, stream: _Stream, number: int, text: str) -> None:
        header = HEADER.match(text)
        if header is not None:
            # Two processes that write into one log begin at once; nothing tells their frames apart.
            if not stream.chained and not (stream.reading and stream.type is None):
                self._end(stream)
            stream.reading, stream.chained = True, False
            stream.indent = len(header["before"]) if not header["before"].strip() else 0
            return
        if stream.type is not None:
            self._continue(stream, number, text)
        elif stream.reading:
            self._frame(stream, number, text)
        elif _CHAIN.search(text) and stream.chain:
            stream.chained = True
        elif not stream.chained or text.strip():
            stream.chained = False
            self._loose(stream, number, text)

    def _frame(self, stream: _Stream, number: int, text: str) -> None:
        match = _FRAME.match(text)
        if match is not None:
            if len(stream.frames) < _MOST_FRAMES:
                function = match["function"] or "<module>"
                stream.frames.append(Frame(match["file"], int(match["line"]), function))
            return
        body = text[stream.indent :] if not text[: stream.indent].strip() else text
        if body[:1].isspace() or not body:
            self._source(stream, body)
            return
        raised = _RAISED.match(body)
        if raised is None:
            return  # another process's words in between
        if not stream.frames and "." not in raised["type"] and not raised["type"].endswith("Error"):
            return
        stream.reading = False
        stream.type, stream.line = raised["type"], number
        stream.message = [raised["message"] or ""]

    @staticmethod
    def _source(stream: _Stream, body: str) -> None:
        text = body.strip()
        if text and stream.frames and stream.frames[-1].source is None and set(text) - set("^~ "):
            last = stream.frames[-1]
            stream.frames[-1] = Frame(last.file, last.line, last.function, text[:300])

    def _continue(self, stream: _Stream, number: int, text: str) -> None:
        """A line after the one that names the exception: more of its message, or the end of it."""
        if _CHAIN.search(text):
            self._close(stream)
            stream.chained = True
            return
        second = TYPED.match(text)
        if second is not None and not text[:1].isspace():
            frames = list(stream.frames)
            self._end(stream)
            stream.frames, stream.type, stream.line = frames, second["type"], number
            stream.message = [second["message"]]
            return
        if len(stream.message) >= _MOST_CONTINUED or _NEW_RECORD.match(text):
            self._end(stream)
            return
        stream.message.append(text)

    def _close(self, stream: _Stream) -> None:
        """The exception that was being read is complete and belongs to the chain."""
        if stream.type is not None:
            message = "\n".join(stream.message).strip()
            stream.chain.append(Raised(stream.type, message, tuple(stream.frames)))
        stream.reading, stream.type, stream.frames, stream.message = False, None, [], []

    def _end(self, stream: _Stream) -> None:
        """The chain that was being read is complete."""
        self._close(stream)
        if stream.chain:
            self._keep(Failure(stream.rank, stream.line, tuple(stream.chain)))
        stream.chain, stream.chained = [], False

    def _loose(self, stream: _Stream, number: int, text: str) -> None:
        """An exception named without a traceback, as in a pasted message or a log record."""
        match = TYPED.search(text)
        if match is not None and not match["type"].endswith("Warning"):
            stream.type, stream.line = match["type"], number
            stream.message, stream.frames, stream.chain = [match["message"]], [], []

    def _keep(self, failure: Failure) -> None:
        last = failure.errors[-1]
        places = tuple((frame.file, frame.line) for frame in last.frames[-3:])
        key = (failure.rank, last.type, last.message[:2000], places)
        if len(self._failures) < MOST_FAILURES:
            self._failures.setdefault(key, failure)


def _timeout(rank: int, number: int, work: str) -> Timeout:
    fields = dict(re.findall(r"(\w+)(?:\(ms\))?=(\w+)", work))
    sequence, elements = fields.get("SeqNum", ""), fields.get("NumelIn", "")
    return Timeout(
        rank=rank,
        line=number,
        operation=fields.get("OpType", "unknown"),
        sequence=int(sequence) if sequence.isdigit() else None,
        elements=int(elements) if elements.isdigit() else None,
    )
