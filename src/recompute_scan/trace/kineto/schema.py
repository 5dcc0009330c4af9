"""What is decoded of an event: the fields in use, and nothing else.

Times become exact nanoseconds, and kinds go over all spellings of a category since torch 1.8.
The field names and their changes over the versions are those of Kineto's own writer
(``libkineto/src/output_json.cpp``) as found in traces of each version. Every field may hold
anything: leniency costs no time, and one odd value must not cost its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import msgspec

# Below this a double holds nanoseconds; 101 days in µs.
EXACT_US = 2.0**43
# The time of an event that has none: the lowest number of 64 bits.
NO_TIME = -(2**63)
# No clock goes there: 140 years in µs. Start and end in ns fit into 63 bits below it.
LATEST_US = 2.0**52


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
