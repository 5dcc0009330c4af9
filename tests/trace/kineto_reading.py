"""Kineto's Chrome-trace JSON to columns, from bytes or a stream that nothing else looked at."""

import io

from recompute_scan.progress import paused
from recompute_scan.trace.columns import DEFAULT_LIMITS, Limits, Trace
from recompute_scan.trace.kineto.reader import CHUNK, Reader
from recompute_scan.trace.streams import Stream


def parse(data: bytes, source: str) -> Trace:
    """The trace in a Kineto JSON document, or in a bare array of its events, Python frames too.

    Args:
        data: The whole document, uncompressed.
        source: Its name, for messages.

    Raises:
        InputError: See :func:`read`.
    """
    return read(io.BytesIO(data), source, python=True)


def read(
    stream: Stream,
    source: str,
    *,
    python: bool = False,
    within: tuple[int, int] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    health: dict[str, int] | None = None,
    chunk: int = CHUNK,
) -> Trace:
    """The trace in a stream without compression, in bounded memory.

    Args:
        stream: The bytes.
        source: Their name, for messages.
        python: Whether ``python_function`` events are kept; they are most of a trace with
            stacks, and passing over them costs nearly nothing.
        within: Only what overlaps this span of time is kept, ns on the trace's clock.
        limits: What is refused.
        health: Counters to add to.
        chunk: Bytes decoded at once.

    Raises:
        InputError: Not JSON (``E302``), JSON but no trace (``E303``), no events (``E304``),
            compressed data without one readable event (``E307``), or beyond a limit
            (``E310`` to ``E315``).
    """
    health = {} if health is None else health
    # Every event is garbage by the end of its chunk, and none is part of a cycle.
    with paused():
        return Reader(stream, source, limits, python, health, within, chunk).read()
