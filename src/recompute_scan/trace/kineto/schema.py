"""Kineto's fields, its brackets, and the outline of a file.

Of an event the fields in use are decoded, and nothing else. Times become exact nanoseconds, and
kinds go over all spellings of a category since torch 1.8. The field names and their changes over
the versions are those of Kineto's own writer (``libkineto/src/output_json.cpp``) as found in traces
of each version. Every field may hold anything: leniency costs no time, and one odd value must not
cost its neighbours.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from itertools import islice, pairwise
from typing import Any, Final

import msgspec
from msgspec import Struct, field

# Matches at every quote, closed or not: a failing match would be tried again at each quote.
STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)'
# A place that looks like the border of two events, whatever the file's layout.
BETWEEN_EVENTS = re.compile(rb"\}\s*,\s*\{\s*\"(?:ph|cat|name|pid|tid|ts|args|s|id)\"\s*:")
_TOKEN = re.compile(STRING + rb"|[{}\[\]]", re.DOTALL)
_MAY_END = re.compile(rb"\}(?=\s*(?:,\s*)*(?:[\]{]|\Z))")
# How many ends of a broken event are likely enough.
_ENDS = 8
# A longer event is none.
_LONGEST = 1 << 20
_WINDOW, _WINDOW_GROWS = 256, 16
# How often each byte is looked at in the mean, for an end and as part of what may be an event,
# before only the nearest end is taken. Sound events take a little over 1.
_LOOKS, _TRIES = 8, 64


class EventSpans:
    """Bytes that hold events, some of them damaged, and where each seems to end.

    To look for the ends of all takes time in proportion to the bytes, whatever they are.

    Attributes:
        data: The bytes.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._looks = _LOOKS * len(data)
        self._tries = _TRIES * len(data)

    def end(self, start: int) -> int:
        """Where the object at ``start`` ends, before another event seems to begin.

        Where so many objects ended nowhere that none is looked at any more: where it may end.

        Returns:
            -1 where it does not end.
        """
        # Through a window that grows: nothing far behind is looked at for a short event's sake.
        window = _WINDOW
        while self._looks > 0:
            border = BETWEEN_EVENTS.search(self.data, start, start + window)
            stop = border.start() + 1 if border else min(start + window, len(self.data))
            end = object_end(self.data, start, stop - start)
            self._looks -= (end if end > 0 else stop) - start
            if end > 0 or border or window >= _LONGEST or stop == len(self.data):
                return end
            window *= _WINDOW_GROWS
        return next(self.likely_ends(start), -1)

    def likely_ends(self, start: int) -> Iterator[int]:
        """Where the broken event at ``start`` may end, the nearest place first."""
        for number, found in enumerate(islice(_MAY_END.finditer(self.data, start), _ENDS)):
            if number and self._tries <= 0:
                break
            self._tries -= found.end() - start
            yield found.end()


def object_end(data: bytes, start: int = 0, most: int = 1 << 20) -> int:
    """Where the value that opens with a bracket at ``start`` ends.

    Returns:
        The place behind it; -1 when it does not end within ``most`` bytes.
    """
    depth = 0
    for token in _TOKEN.finditer(data, start, min(len(data), start + most)):
        first = token[0]
        if first in (b"{", b"["):
            depth += 1
        elif first in (b"}", b"]"):
            depth -= 1
            if depth <= 0:
                return token.end()
    return -1


def measure_nesting(data: bytes, enough: int) -> int:
    """How deep values are nested, strings aside; counted up to ``enough``."""
    depth = deepest = 0
    for token in _TOKEN.finditer(data):
        first = token[0]
        if first in (b"{", b"["):
            depth += 1
            deepest = max(deepest, depth)
            if deepest >= enough:
                break
        elif first in (b"}", b"]"):
            depth -= 1
    return deepest


# Below this a double holds nanoseconds; 101 days in µs.
EXACT_US = 2.0**43
# The time of an event that has none: the lowest number of 64 bits.
NO_TIME = -(2**63)
# No clock goes there: 140 years in µs. Start and end in ns fit into 63 bits below it.
LATEST_US = 2.0**52
# Nor does one begin five years before it counts from zero, in ns.
EARLIEST = -(2**57)


def is_coarse(ts: Any) -> bool:
    """Whether a time in µs may have lost its nanoseconds when it became a double."""
    return isinstance(ts, float) and ts > EXACT_US


def nanoseconds(value: Any) -> int:
    """One time in ns: :class:`Ns` as it is, numbers as µs; ``NO_TIME`` for anything else."""
    if isinstance(value, Ns):
        ns = int(value)
    elif isinstance(value, (int, float)) and abs(value) < LATEST_US:
        ns = round(value * 1000)  # exact for an int, which most are
    else:
        return NO_TIME
    return ns if abs(ns) < LATEST_US * 1000 else NO_TIME


class Kind:
    """What an event is; the host's calls come first. Plain numbers, as NumPy compares them fast."""

    OP: Final = 0
    ANNOTATION: Final = 1
    RUNTIME: Final = 2
    KERNEL: Final = 3
    COPY: Final = 4
    PYTHON: Final = 5
    OTHER: Final = 6


KIND_NAMES = ("op", "annotation", "runtime", "kernel", "copy", "python", "other")

KINDS = {
    "cpu_op": Kind.OP,
    "Operator": Kind.OP,
    "user_annotation": Kind.ANNOTATION,
    "cuda_runtime": Kind.RUNTIME,
    "cuda_driver": Kind.RUNTIME,
    "Runtime": Kind.RUNTIME,
    "kernel": Kind.KERNEL,
    "Kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.COPY,
    "gpu_memset": Kind.COPY,
    "Memcpy": Kind.COPY,
    "Memset": Kind.COPY,
    "python_function": Kind.PYTHON,
}


_NOTHING = msgspec.Raw(b"")


class Args(msgspec.Struct, gc=False, frozen=True):
    """The arguments in use. Shapes stay the bytes they came in: to decode them costs more."""

    correlation: Any = -1
    stream: Any = -1
    input_type: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input type")
    input_dims: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input Dims")
    old_input_dims: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input dims")
    sequence: Any = msgspec.field(default=-1, name="Sequence number")
    made_by: Any = msgspec.field(default=-1, name="Fwd thread id")
    values: msgspec.Raw = msgspec.field(default=_NOTHING, name="Concrete Inputs")
    number: Any = msgspec.field(default=-1, name="Ev Idx")


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    """One event, its fields in the order in which Kineto writes them (decoding is faster so)."""

    ph: Any = ""
    cat: Any = ""
    name: Any = ""
    pid: Any = -1
    tid: Any = -1
    ts: Any = None
    dur: Any = None
    args: Args | None = NO_ARGS


class Document(msgspec.Struct):
    """The whole file: its events, and what it says about itself."""

    traceEvents: list[Event] | None = None  # noqa: N815 - the format's own name
    distributedInfo: Any = None  # noqa: N815
    deviceProperties: Any = None  # noqa: N815
    schemaVersion: Any = None  # noqa: N815
    baseTimeNanoseconds: Any = None  # noqa: N815
    record_shapes: Any = None
    with_stack: Any = None
    profile_memory: Any = None
    cuda_runtime_version: Any = None
    hip_runtime_version: Any = None


class Ns(int):
    """A time that was written as microseconds with a fraction, in whole nanoseconds."""


def exact_time(text: str) -> Ns | float:
    """The nanoseconds of a number of microseconds, without the detour over a float.

    A double holds microseconds since 1970 to the nearest quarter; the text has all digits.
    """
    try:
        return Ns((Decimal(text) * 1000).to_integral_value())
    except (InvalidOperation, OverflowError, ValueError):
        return float(text)


Decode = Callable[[memoryview | bytes], list[Event]]

decode_events: Decode = msgspec.json.Decoder(list[Event]).decode
decode_events_exactly: Decode = msgspec.json.Decoder(list[Event], float_hook=exact_time).decode
decode_document: Callable[[bytes], Document] = msgspec.json.Decoder(Document).decode
decode_document_exactly: Callable[[bytes], Document] = msgspec.json.Decoder(
    Document, float_hook=exact_time
).decode

# What a decoder raises on bytes it cannot take; RecursionError says "too deep".
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


_TIME = re.compile(rb'"ts"\s*:\s*(\d+(?:\.\d+)?)[\s,}]')


def earliest(data: bytearray, first: int, stop: int) -> float:
    """The earlier of the times that stand first and last in a part of a buffer, ns.

    Minus infinity where either cannot be told.
    """
    times = []
    for at in (data.find(b'"ts"', first, stop), data.rfind(b'"ts"', first, stop)):
        written = _TIME.match(data, max(at, 0))
        if not written:
            return -math.inf
        times.append(float(written[1]) * 1000)
    return min(times)


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

        The last part, whose end is ``None``, is always among them.
        """
        ends = pairwise([*self.begins, None])
        for (begin, end), earliest in zip(ends, self.earliest, strict=True):
            if begin is not None and (earliest < time or end is None):
                yield begin, end


class Excerpt:
    """Parts of a file as one stream; each begins with an event, so that they read as a trace.

    Args:
        file: The file.
        parts: Begin and end of each, in order; ``None`` for the end of the file.
    """

    def __init__(self, file: io.RawIOBase, parts: Iterator[tuple[int, int | None]]) -> None:
        self._file = file
        self._parts = parts
        self._left = 0

    def readinto(self, buffer: memoryview, /) -> int:
        """See :class:`recompute_scan.trace.streams.Stream`."""
        while not self._left:
            begin, end = next(self._parts, (None, None))
            if begin is None:
                return 0
            self._file.seek(begin)
            size = self._file.seek(0, io.SEEK_END) if end is None else end
            self._file.seek(begin)
            self._left = max(0, size - begin)
        number = self._file.readinto(buffer[: self._left]) or 0
        self._left = self._left - number if number else 0
        return number
