"""A host with a GPU, in a hundred lines: runs a program and writes what a profiler would see.

Knows nothing of the tool. Kernels start ``LAG`` after their launch at the earliest, ``GAP`` after
the one before on their stream (or after all but its ``early`` part), and ``GAP`` after what an
event makes them wait for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

LAUNCH = 4.0
RUNTIME = 2.0
BETWEEN = 1.0
LAG = 5.0
GAP = 1.0
MAIN, AUTOGRAD = 1, 2


@dataclass(frozen=True)
class Do:
    """One instruction; ``redundant`` ones are left out when the program is repaired."""

    what: str
    us: float = 0.0
    stream: int = 7
    event: str = ""
    inside: tuple[Do, ...] = ()
    redundant: bool = False


def host(us: float, *, redundant: bool = False) -> Do:
    """An operator without a kernel."""
    return Do("host", us, redundant=redundant)


def launch(us: float, stream: int = 7, *, redundant: bool = False) -> Do:
    """A kernel of so many µs."""
    return Do("launch", us, stream, redundant=redundant)


def wait_stream(stream: int, other: int, *, redundant: bool = False) -> tuple[Do, Do]:
    """What is launched on ``stream`` from here waits for what ``other`` was given so far."""
    name = f"{other}>{stream}"
    return (
        Do("record", stream=other, event=name, redundant=redundant),
        Do("wait", stream=stream, event=name, redundant=redundant),
    )


def synchronize() -> Do:
    """The host waits for the whole GPU."""
    return Do("synchronize")


def backward(*inside: Do) -> Do:
    """The host waits until the autograd thread has done this."""
    return Do("backward", inside=inside)


@dataclass
class Machine:
    """Runs programs, one step each, and keeps the events.

    Attributes:
        early: The part of a kernel that is left when the next one of its stream begins.
        events: Kineto events so far.
        gone: For each row of redundant instructions its thread, beginning and end (µs).
        finished: When each step was over, host and GPU, µs.
    """

    early: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)
    gone: list[tuple[int, float, float]] = field(default_factory=list)
    finished: list[float] = field(default_factory=list)
    _now: float = 0.0
    _ended: dict[int, float] = field(default_factory=dict)
    _free: dict[int, float] = field(default_factory=dict)
    _recorded: dict[str, float] = field(default_factory=dict)
    _blocked: dict[int, float] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def step(self, program: Sequence[Do]) -> None:
        """One step of the training loop."""
        begin = self._now
        self._now += BETWEEN
        self._run(program, MAIN)
        self._event("user_annotation", f"ProfilerStep#{len(self.finished)}", MAIN, begin)
        self.finished.append(max(self._now, *self._ended.values(), 0.0))

    def _run(self, program: Sequence[Do], thread: int) -> None:
        open_at: float | None = None
        for do in program:
            if do.redundant and open_at is None:
                open_at = self._now
            elif not do.redundant and open_at is not None:
                self.gone.append((thread, open_at, self._now))
                open_at = None
            self._one(do, thread)
            self._now += BETWEEN
        if open_at is not None:
            self.gone.append((thread, open_at, self._now))

    def _one(self, do: Do, thread: int) -> None:
        begin = self._now
        if do.what == "host":
            self._now += do.us
            self._event("cpu_op", "aten::view", thread, begin)
        elif do.what == "launch":
            self._now += LAUNCH
            number = next(self._numbers)
            self._event("cuda_runtime", "cudaLaunchKernel", thread, begin, correlation=number)
            ready = max(
                begin + LAG,
                self._free.get(do.stream, -GAP) + GAP,
                self._blocked.pop(do.stream, -GAP) + GAP,
            )
            self._free[do.stream] = ready + do.us * (1 - self.early)
            self._ended[do.stream] = max(self._ended.get(do.stream, 0.0), ready + do.us)
            self.events.append(
                {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": do.stream, "ts": ready}
                | {"dur": do.us, "args": {"stream": do.stream, "correlation": number}}
            )
        elif do.what == "record":
            self._now += RUNTIME
            self._event("cuda_runtime", "cudaEventRecord", thread, begin)
            self._recorded[do.event] = self._ended.get(do.stream, 0.0)
        elif do.what == "wait":
            self._now += RUNTIME
            self._event("cuda_runtime", "cudaStreamWaitEvent", thread, begin)
            until = max(self._recorded[do.event], self._blocked.get(do.stream, 0.0))
            self._blocked[do.stream] = until
        elif do.what == "synchronize":
            self._now = max(self._now + RUNTIME, *self._ended.values(), 0.0) + BETWEEN
            self._event("cuda_runtime", "cudaDeviceSynchronize", thread, begin)
        elif do.what == "backward":
            self._now += LAG
            start = self._now
            self._run(do.inside, AUTOGRAD)
            name = "autograd::engine::evaluate_function: MmBackward0"
            self._event("cpu_op", name, AUTOGRAD, start)
            self._now += LAG

    def _event(self, kind: str, name: str, thread: int, begin: float, **args: Any) -> None:
        event = {"ph": "X", "cat": kind, "name": name, "pid": 100, "tid": thread}
        self.events.append(event | {"ts": begin, "dur": self._now - begin, "args": args})


def run(program: Sequence[Do], steps: int = 3, early: float = 0.0) -> Machine:
    """The same step a few times."""
    machine = Machine(early)
    for _ in range(steps):
        machine.step(program)
    return machine


def repaired(program: Sequence[Do]) -> list[Do]:
    """The program without its redundant."""
    return [
        Do(do.what, do.us, do.stream, do.event, tuple(repaired(do.inside)))
        for do in program
        if not do.redundant
    ]
