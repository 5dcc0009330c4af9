"""Kineto's Chrome-trace JSON to columns: the two ways in, from bytes and from a stream."""

from __future__ import annotations

import io
from pathlib import Path

from recompute_scan.collecting import paused
from recompute_scan.trace.columns import Trace
from recompute_scan.trace.kineto.layout import CHUNK
from recompute_scan.trace.kineto.reader import Reader
from recompute_scan.trace.limits import DEFAULT_LIMITS, Limits
from recompute_scan.trace.streams import Stream, inflate


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
    raw: Stream,
    source: str,
    *,
    python: bool = False,
    within: tuple[int, int] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    health: dict[str, int] | None = None,
    path: Path | None = None,
    chunk: int = CHUNK,
) -> Trace:
    """The trace in a stream, plain or compressed, in bounded memory.

    Args:
        raw: The bytes; gzip and Zstandard are told by the first of them.
        source: Their name, for messages.
        python: Whether ``python_function`` events are kept; they are most of a trace with
            stacks, and passing over them costs nearly nothing.
        within: Only what overlaps this span of time is kept, ns on the trace's clock.
        limits: What is refused.
        health: Counters that the raw stream adds to while it is read.
        path: Where the same bytes lie; a large plain file is then read by two processes.
        chunk: Bytes decoded at once.

    Raises:
        InputError: Not JSON (``E302``), JSON but no trace (``E303``), no events (``E304``),
            compressed data without one readable event (``E307``), or beyond a limit
            (``E310`` to ``E315``).
    """
    health = {} if health is None else health
    stream, compressed = inflate(raw, source, limits, health)
    return read_inflated(
        stream,
        source,
        python=python,
        within=within,
        limits=limits,
        health=health,
        path=None if compressed else path,
        chunk=chunk,
    )


def read_inflated(
    stream: Stream,
    source: str,
    *,
    python: bool,
    within: tuple[int, int] | None,
    limits: Limits,
    health: dict[str, int],
    path: Path | None,
    chunk: int = CHUNK,
) -> Trace:
    """The same of a stream without compression; ``path`` is where its bytes lie, if anywhere."""
    # Every event is garbage by the end of its chunk, and none is part of a cycle.
    with paused():
        reader = Reader(stream, source, limits, python, health, within, chunk)
        return reader.read(path)
