"""The events of a run for another program: one JSON object a line, as they happen.

The stream is written in the script's own process, so it takes nothing of the script's. It waits for
no reader and raises nothing; lines that a reader was too slow for are left out and counted.
"""

from __future__ import annotations

import os
import re
import signal
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import time
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from recompute_scan.errors import UsageError
from recompute_scan.files import NO_WAIT
from recompute_scan.terminal import file_at

SCHEMA = "recompute-scan-event/1"
# A line stays below what a pipe takes whole (PIPE_BUF, 4,096 bytes).
_LONGEST = 300
_MOST = 6
_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)\Z")
_SCRIPTS = ("/dev/stdin", "/dev/stdout", "/dev/stderr")

PhaseName = Literal[
    "warmup", "timing", "waiting", "trace", "stacks", "comparing", "watching", "counting", "done"
]


class EventLine(Struct, frozen=True, kw_only=True, tag_field="event"):
    """The fields of every line.

    Attributes:
        schema: The version of this format; fields may be added to it, and lines of other kinds.
        time: When it was written, seconds since the epoch.
        process: The process that wrote it.
        rank: Its rank as last known; ``None`` for a command that runs alone.
        lost: Lines of this process that the reader was too slow for, since the one before.
    """

    schema: str = SCHEMA
    time: float = 0.0
    process: int = 0
    rank: int | None = None
    lost: int = 0


class CommandStarted(EventLine, frozen=True, tag="started"):
    """A command has begun; ``folder`` is where it writes, ``None`` where it has none."""

    command: str
    tool_version: str
    folder: str | None


class PhaseBegun(EventLine, frozen=True, tag="phase"):
    """The purpose of the steps from here on, after so many; ``done`` where nothing is recorded."""

    phase: PhaseName
    step: int


class StepEnded(EventLine, frozen=True, tag="step"):
    """A step of the training has ended, counted from 1; sent until nothing more is recorded."""

    step: int


class ProgressTold(EventLine, frozen=True, tag="progress"):
    """One line of progress, in words."""

    text: str


class WarningTold(EventLine, frozen=True, tag="warning"):
    """A warning for a person."""

    text: str


class ChangeTold(EventLine, frozen=True, tag="change"):
    """The guard has noticed a change: fields as in ``recompute_scan.guarding.judge.Change``."""

    kind: str
    step: int
    modules: tuple[str, ...]
    sites: tuple[str, ...]
    before: int
    after: int
    text: str


class ScriptEnded(EventLine, frozen=True, tag="script"):
    """The script has ended in this process, after so many steps."""

    ending: Literal["finished", "stopped", "exited", "raised", "interrupted", "terminated", "hung"]
    exit_status: int
    error: str | None
    steps: int


class FindingTold(EventLine, frozen=True, tag="finding"):
    """One finding of the result that comes next."""

    code: str
    severity: str
    confidence: str
    title: str
    saving_pct: float | None
    wrong_gradients: bool
    fix: str | None


class ResultTold(EventLine, frozen=True, tag="result"):
    """The verdict, and the files that have all of it; ``None`` for one that was not written."""

    verdict: str
    confidence: str
    recompute_per_backward: float | None
    findings: int
    verified: str | None
    result: str | None
    page: str | None


class ErrorTold(EventLine, frozen=True, tag="error"):
    """The command gives up; codes as in the list of messages, ``None`` for a wrong option."""

    code: str | None
    what: str
    why: str | None
    hint: str | None


class CommandEnded(EventLine, frozen=True, tag="ended"):
    """The command's last line."""

    exit_status: int


_Event = TypeVar("_Event", bound=EventLine)
AnyEvent = (
    CommandStarted
    | PhaseBegun
    | StepEnded
    | ProgressTold
    | WarningTold
    | ChangeTold
    | ScriptEnded
    | FindingTold
    | ResultTold
    | ErrorTold
    | CommandEnded
)


def like(kind: type[_Event], one: object, **others: Any) -> _Event:
    """An event with the fields that an object has by the same names, and others as given."""
    names = set(kind.__struct_fields__) - {*EventLine.__struct_fields__, *others}
    return kind(**{name: getattr(one, name) for name in names} | others)


def event_schema() -> dict[str, Any]:
    """A JSON Schema (2020-12) of one line."""
    schema = msgspec.json.schema(AnyEvent)
    for definition in schema["$defs"].values():
        definition["required"] = list(definition["properties"])
        definition["properties"]["schema"] = {"const": SCHEMA}
    title = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "An event"}
    return title | schema


def read_event(line: str | bytes) -> AnyEvent:
    """One line as an event.

    Raises:
        ValueError: It is no such event.
    """
    event: AnyEvent = msgspec.json.decode(line, type=AnyEvent)
    if event.schema != SCHEMA:
        raise ValueError(f"schema {event.schema}")
    return event


class EventStream:
    """Writes events to one file; every process opens it for itself.

    Attributes:
        path: The file, absolute.
        rank: This process among others.

    Raises:
        UsageError: It cannot be written, the pipe has no reader, it belongs to the script, or it
            holds something else (``E235``).
    """

    def __init__(self, path: str) -> None:
        self.path = _absolute(path)
        self.rank: int | None = None
        self._process = os.getpid()
        self._lost = 0
        self._torn = False
        if why := self._refused():
            raise UsageError(
                "E235",
                f"Cannot write events to {path}.",
                why=why,
                hint="give a new file, or a pipe that is being read, such as /dev/fd/3",
            )

    def _refused(self) -> str | None:
        """Why it cannot be written; ``None`` where it is open now."""
        if self.path in _SCRIPTS:
            return "it is the script's own"
        try:
            self._open()
            if stat.S_ISREG(self._mode):
                with open(self.path, "rb") as file:  # noqa: PTH123 - text, as given
                    if file.read(9) not in (b"", b'{"event":'):
                        return "it holds something else than events"
        except (OSError, ValueError) as error:  # a name with a null character
            return getattr(error, "strerror", None) or str(error)
        return None

    def tell(self, event: AnyEvent) -> None:
        """Write a line. Raises nothing, and does nothing in a forked process."""
        if self._process != os.getpid():
            return
        with suppress(Exception):  # whatever becomes of the file, the script goes on
            self._write(_encoded(event, self._process, self.rank, self._lost))

    def close(self) -> None:
        """Let go of the file."""
        with suppress(OSError):
            if self._ours():
                os.close(self._descriptor)

    def _open(self) -> None:
        # A pipe without a reader is an error, instead of something to wait for.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_WAIT
        self._descriptor = os.open(self.path, flags, 0o666)
        found = os.fstat(self._descriptor)
        self._mode, self._file = found.st_mode, (found.st_dev, found.st_ino)

    def _ours(self) -> bool:
        """Whether the descriptor is still that file: a script may close what it has not opened,
        and open something else by its number.
        """
        return file_at(self._descriptor) == self._file

    def _write(self, line: bytes) -> None:
        if not self._ours():
            self._open()
        whole = b"\n" + line if self._torn else line
        try:
            with _no_signal():
                written = os.write(self._descriptor, whole)
        except OSError:
            self._lost += 1
            return
        self._torn = written != len(whole)
        self._lost = int(self._torn)


class TrainingEvents:
    """Writes an event at the end of each step of a training; phases and steps are rank 0's.

    Args:
        path: The file of the stream; empty for none.

    Raises:
        UsageError: The file cannot be written (``E235``).
    """

    def __init__(self, path: str) -> None:
        self._stream = EventStream(path) if path else None
        self._phase: PhaseName | None = None

    def boundary(self, phase: PhaseName, steps: int, rank: int) -> None:
        """So many steps have ended, and the next ones belong to this phase."""
        if self._stream is None:
            return
        self._stream.rank = rank
        if rank:
            return
        if steps:
            self._tell(StepEnded(step=steps))
        if phase != self._phase:
            self._phase = phase
            self._tell(PhaseBegun(phase=phase, step=steps))

    def progress(self, text: str) -> None:
        """One line of progress."""
        self._tell(ProgressTold(text=text))

    def ended(self, ended: ScriptEnded, rank: int, warnings: Iterable[str]) -> None:
        """The script has ended, with these warnings in its run record."""
        if self._stream is not None:
            self._stream.rank = rank
            for text in warnings:
                self._tell(WarningTold(text=text))
            self._tell(ended)
            self._stream.close()

    def _tell(self, event: AnyEvent) -> None:
        if self._stream is not None:
            self._stream.tell(event)


def _absolute(path: str) -> str:
    """The same file in other processes too, and whatever the current directory is."""
    held = _DESCRIPTOR.match(path)
    if held is None:
        return str(Path(path).absolute())
    if int(held[1]) < len(_SCRIPTS):
        return _SCRIPTS[int(held[1])]
    there = f"/proc/{os.getpid()}/fd/{held[1]}"
    return there if Path("/proc/self/fd").exists() else path


def _encoded(event: AnyEvent, process: int, rank: int | None, lost: int) -> bytes:
    fields = {name: _short(getattr(event, name)) for name in event.__struct_fields__}
    fields |= {"time": round(time(), 6), "process": process, "rank": rank, "lost": lost}
    return msgspec.json.encode(type(event)(**fields)) + b"\n"


def _short(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_short(one) for one in value[:_MOST])
    if not isinstance(value, str):
        return value
    # Names that are no UTF-8 have lone surrogates.
    text = value.encode("utf-8", "replace").decode()
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


@contextmanager
def _no_signal() -> Iterator[None]:
    """Run the body without the signal of a pipe without a reader, which ends a process where a
    script has put its default action back.
    """
    pipe = getattr(signal, "SIGPIPE", None)
    if pipe is None or signal.getsignal(pipe) is signal.SIG_IGN:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {pipe})
    try:
        yield
    finally:
        if pipe not in before:
            if pipe in signal.sigpending():
                signal.sigwait({pipe})
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {pipe})
