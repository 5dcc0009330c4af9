"""Synthetic Kineto traces in a few readable lines.

A trace is a list of threads, a thread a sequence of nested calls; times follow from the nesting::

    document(
        thread(
            step(0, op("aten::linear", seq=3), node("AddmmBackward0", op("aten::mm"), seq=3)),
        )
    )

Leaves last 10 µs unless told otherwise, a call lasts as long as what it holds, and one
microsecond lies between calls.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recompute_scan.recompute.study import RecomputeFacts, study
from recompute_scan.trace import Trace
from tests.trace.kineto_reading import parse

ENGINE = "autograd::engine::evaluate_function: "
GAP = 1.0
LEAF = 10.0
LAUNCH = 2.0
# From a launch to its kernel's start, on an idle device.
LAG = 5.0

Json = dict[str, Any]


@dataclass(frozen=True)
class Kernel:
    """Device work: µs, stream, start (``None``: as soon as launched and the stream is free)."""

    name: str
    us: float
    stream: int = 7
    at: float | None = None
    category: str = "kernel"


@dataclass(frozen=True)
class Call:
    """One host event with the events inside it. Without a name it is time that passes."""

    name: str | None
    category: str = "cpu_op"
    inside: tuple[Call, ...] = ()
    us: float | None = None
    args: Json = field(default_factory=dict)
    kernel: Kernel | None = None

    def again(self) -> Call:
        """The same work without sequence numbers: as a recompute without gradients records it."""
        args = {key: value for key, value in self.args.items() if key != "Sequence number"}
        return replace(self, args=args, inside=tuple(call.again() for call in self.inside))


@dataclass(frozen=True)
class Thread:
    calls: tuple[Call, ...]
    tid: int | str
    pid: int | str
    start: float


def op(
    name: str,
    *inside: Call,
    seq: int | None = None,
    us: float | None = None,
    dims: Any = None,
    types: Any = None,
) -> Call:
    """An operator; ``seq`` is autograd's sequence number, the rest its inputs' shapes and types."""
    args: Json = {}
    if seq is not None:
        args["Sequence number"] = seq
    if dims is not None:
        args["Input Dims"] = dims
    if types is not None:
        args["Input type"] = types
    return Call(name, inside=inside, us=us, args=args)


def node(name: str, *inside: Call, seq: int | None = None) -> Call:
    """The engine's range around an autograd node, and the node; ``seq`` stands on both."""
    return op(ENGINE + name, op(name, *inside, seq=seq), seq=seq)


def annotation(name: str, *inside: Call, us: float | None = None) -> Call:
    """A ``record_function`` range."""
    return Call(name, "user_annotation", inside, us)


def step(number: int, *inside: Call, us: float | None = None) -> Call:
    """The profiler's own range around a step."""
    return annotation(f"ProfilerStep#{number}", *inside, us=us)


def optimizer(*inside: Call, us: float | None = None) -> Call:
    """The optimizer's own range around its update."""
    return annotation("Optimizer.step#AdamW.step", *inside, us=us)


def launch(name: str, us: float = LEAF, **where: Any) -> Call:
    """A kernel launch; ``where`` are fields of :class:`Kernel`."""
    return Call("cudaLaunchKernel", "cuda_runtime", us=LAUNCH, kernel=Kernel(name, us, **where))


def wait(us: float) -> Call:
    """Time in which this thread does nothing."""
    return Call(None, us=us)


def thread(*calls: Call, tid: int | str = 1, pid: int | str = 100, start: float = 0.0) -> Thread:
    return Thread(calls, tid, pid, start)


def document(*threads: Thread, **fields: Any) -> Json:
    """A Kineto document; ``fields`` are further top-level fields."""
    events: list[Json] = []
    launched: list[tuple[float, int, Kernel]] = []
    numbers = itertools.count(1)
    for one in threads:
        at = one.start
        for call in one.calls:
            at = _place(call, at, one, events, launched, numbers) + GAP
    free: dict[int, float] = {}
    for time, correlation, kernel in sorted(launched, key=lambda item: item[:2]):
        begin = max(time + LAG, free.get(kernel.stream, 0.0)) if kernel.at is None else kernel.at
        free[kernel.stream] = begin + kernel.us
        events.append(
            {"ph": "X", "cat": kernel.category, "name": kernel.name, "pid": 0, "tid": kernel.stream}
            | {"ts": begin, "dur": kernel.us}
            | {"args": {"stream": kernel.stream, "correlation": correlation}}
        )
    return {"schemaVersion": 1, "traceEvents": events, **fields}


def loaded(*threads: Thread, **fields: Any) -> Trace:
    """The trace as the program sees it."""
    return parse(as_bytes(document(*threads, **fields)), "synthetic")


def studied(*threads: Thread) -> RecomputeFacts:
    """What the program finds in it."""
    return study(loaded(*threads))


def as_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


def write(file: Path, *calls: Call, **fields: Any) -> Path:
    file.write_bytes(as_bytes(document(thread(*calls), **fields)))
    return file


def _place(
    call: Call,
    start: float,
    where: Thread,
    events: list[Json],
    launched: list[tuple[float, int, Kernel]],
    numbers: itertools.count[int],
) -> float:
    """Append the call and all inside it; its end."""
    if call.name is None:
        return start + (call.us or 0.0)
    event: Json = {"ph": "X", "cat": call.category, "name": call.name}
    event |= {"pid": where.pid, "tid": where.tid, "ts": start, "args": dict(call.args)}
    events.append(event)
    if call.kernel is not None:
        correlation = next(numbers)
        event["args"]["correlation"] = correlation
        launched.append((start, correlation, call.kernel))
    at = start
    for inner in call.inside:
        at = _place(inner, at + GAP, where, events, launched, numbers)
    least = call.us if call.us is not None else (0.0 if call.inside else LEAF)
    end = max(start + least, at + GAP if call.inside else start)
    event["dur"] = end - start
    return end
