"""A trace as columns, the only form in which the rest of the program sees one.

Also how much of a file may be taken in, and what names of torch's own events say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from recompute_scan.errors import InputError

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Int16 = npt.NDArray[np.int16]
Int8 = npt.NDArray[np.int8]
# Rows of a trace and rows of `Calls`: arrays of numbers that must not be mixed up.
EventRows = Int64
CallRows = Int64

# Whole numbers of any width.
Ints = npt.NDArray[np.signedinteger[Any]]
Bool = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]
# A trace has its times in ns, a result in ms.
NS_PER_MS = 1e6


class Kind:
    """The kind of an event; the host's calls come first. NumPy compares plain numbers fast."""

    OP: Final = 0
    ANNOTATION: Final = 1
    RUNTIME: Final = 2
    KERNEL: Final = 3
    COPY: Final = 4
    PYTHON: Final = 5
    OTHER: Final = 6


KIND_NAMES = ("op", "annotation", "runtime", "kernel", "copy", "python", "other")


class Outline(Struct):
    """The parts of a plain file, in order.

    Attributes:
        begins: Where in the file each begins: with an event, except for the first.
        earliest: The earlier of the times of its first and last event, ns; minus infinity where
            it is unknown.
    """

    begins: list[int] = field(default_factory=lambda: [0])
    earliest: list[float] = field(default_factory=lambda: [-math.inf])

    def add(self, begin: int, time: float) -> None:
        """Note the next part."""
        self.begins.append(begin)
        self.earliest.append(time)

    def before(self, time: int) -> Iterator[tuple[int, int | None]]:
        """Begin and end of the parts that do not begin and end at this time, in ns, or later.

        The last part is always among them; its end is ``None``.
        """
        ends = pairwise([*self.begins, None])
        for (begin, end), earliest in zip(ends, self.earliest, strict=True):
            if begin is not None and (earliest < time or end is None):
                yield begin, end


class Trace(Struct, frozen=True):
    """One process's trace. Every array has one entry per event, in file order.

    Numbers have 32 bits unless one of the column needs 64.

    Attributes:
        name: Code into ``names``.
        kind: A :class:`Kind`.
        thread: Code into ``threads``: the host thread, or the device stream's row.
        ts: Start, in ns on the trace's own clock, 0 or more.
        dur: Duration in ns, 0 or more.
        sequence: Autograd's sequence number, -1 where there is none.
        correlation: Number that ties a launch to its kernel, -1 where there is none.
        stream: Device stream, -1 on the host.
        dims: Code into ``signatures`` (input shapes and types), 0 where not recorded.
        names: Distinct event names.
        threads: Distinct (process, thread) pairs, as text.
        signatures: Distinct input shapes and types, as JSON text; the first is empty.
        rank: Rank from ``distributedInfo``, or ``None``.
        metadata: What the file says about itself (versions, devices); JSON values.
        health: Counters of repaired, dropped and missing events; their sentences are in
            :mod:`recompute_scan.trace.health`.
        left_out: Events of the file that are sound but not here: arrows, marks without a
            duration, and Python frames unless they were asked for.
        cut_at: Where the file was cut among the host's calls: start of the last one that was
            read, in ns. A step that ends later was not read whole. ``None`` where all of
            the host's calls are there.
        outline: Which parts of the file hold which times; ``None`` where it is compressed.
        made_by: Of a node, autograd's number of the thread that made it, from 1; -1 for unknown,
            and for what is no node. ``None`` where the format does not say.
        moved: What was added to the file's times, so that none is negative, ns.
    """

    name: Int32
    kind: Int8
    thread: Int32
    ts: Int64
    dur: Int64
    sequence: Ints
    correlation: Ints
    stream: Ints
    dims: Int32
    names: tuple[str, ...]
    threads: tuple[tuple[str, str], ...]
    signatures: tuple[str, ...]
    rank: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    health: dict[str, int] = field(default_factory=dict)
    left_out: int = 0
    cut_at: int | None = None
    outline: Outline | None = None
    made_by: Ints | None = None
    moved: int = 0

    def __len__(self) -> int:
        return len(self.ts)


class Limits(Struct, frozen=True):
    """Bounds on one trace. A file beyond one of them is refused with its code, not cut.

    Attributes:
        inflated_bytes: Bytes that a compressed file may inflate to (``E310``).
        ratio: Inflated bytes for each compressed one, looked at once more than
            ``ratio_from`` bytes came out (``E311``). Traces stay below 20; one repeated
            character reaches 1000.
        ratio_from: See ``ratio``.
        depth: How deep values may be nested (``E312``). Traces need 6.
        events: Events kept (``E313``); each takes 53 bytes of memory.
        distinct: Distinct names, and distinct input shapes (``E314``).
        threads: Threads, streams of a GPU among them (``E330``). One process stays below 100.
        event_bytes: Size of one event, or of the bytes before the first (``E315``).
        members: Files in an archive (``E316``).
        name_chars: Longer names are cut, and counted as ``names_shortened``.
    """

    inflated_bytes: int = 64 * 2**30
    ratio: int = 250
    ratio_from: int = 16 * 2**20
    depth: int = 500
    events: int = 200_000_000
    distinct: int = 5_000_000
    threads: int = 2_000
    event_bytes: int = 64 * 2**20
    members: int = 10_000
    name_chars: int = 20_000


DEFAULT_LIMITS = Limits()


# The fault of a file beyond a limit, the option that lifts the limit, and a reason.
_REFUSALS = {
    "E310": ("inflates to more than {size}", "--max-inflated-bytes", None),
    "E311": (
        "inflates more than {limit} times, as no trace does",
        "--max-ratio",
        "it looks like a file made to fill the memory",
    ),
    "E312": ("nests values more than {limit} deep", "--max-depth", None),
    "E313": ("holds more than {limit:,} events", "--max-events", None),
    "E314": ("holds more than {limit:,} {what}", "--max-distinct", None),
    "E315": (
        "goes on for {size} without an event's end",
        "--max-event-bytes",
        "it is no trace, or one of its strings was never closed",
    ),
    "E316": ("holds more than {limit:,} files", "--max-members", None),
    "E330": ("holds more than {limit:,} threads", "--max-threads", None),
}


def refuse(code: str, source: str, limit: int, what: str = "") -> InputError:
    """The error of a file that is beyond a limit, by its code; see :class:`Limits`."""
    does, option, why = _REFUSALS[code]
    text = does.format(limit=limit, size=_size(limit), what=what)
    hint = f"if it is right, lift the limit with {option}"
    return InputError(code, f"{source} {text}.", why=why, hint=hint)


def _size(number: int) -> str:
    for unit, size in (("GB", 2**30), ("MB", 2**20), ("kB", 2**10)):
        if number >= size:
            return f"{number // size} {unit}"
    return f"{number} bytes"


# Ranges that torch itself opens and that are no operators.
RANGE = re.compile(r"ProfilerStep#|Optimizer\.|nccl:|gloo:|mpi:|recompute_scan\.|enumerate\(")
# Operators, of other libraries too, nodes, and what compiled code runs as: where it is torch that
# wrote the event.
OPERATOR = re.compile(
    r"[A-Za-z_]\w*(::[A-Za-z_]\w*)+(\.\w+)?$|autograd::engine::|\w+Backward\d*$|record_param_comms$"
    r"|Torch-Compiled Region|CompiledFunction|TorchDynamo |AOTDispatcher |Pregraph bytecode|triton_"
)
