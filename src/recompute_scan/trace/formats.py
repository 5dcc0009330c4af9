"""A stream of bytes to a trace: what kind it is, is told by its first bytes, not by its name."""

from __future__ import annotations

from msgspec.structs import replace

from recompute_scan.collecting import paused
from recompute_scan.errors import InputError
from recompute_scan.trace.columns import Kind, Trace
from recompute_scan.trace.kineto.layout import CHUNK
from recompute_scan.trace.kineto.reader import Reader
from recompute_scan.trace.limits import DEFAULT_LIMITS, Limits
from recompute_scan.trace.looks import look_at_names
from recompute_scan.trace.streams import Front, Stream, inflate

_HEAD = 64
_LOOKED_AT = 2000


def read(
    raw: Stream,
    source: str,
    *,
    python: bool = False,
    within: tuple[int, int] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    health: dict[str, int] | None = None,
    again: bool = False,
) -> Trace:
    """The trace in a stream, plain or compressed.

    Args:
        raw: The bytes.
        source: Their name, for messages.
        python: Whether Python frames are kept.
        within: Only what overlaps this span of time is kept, ns on the trace's clock.
        limits: What is refused.
        health: Counters that the raw stream adds to while it is read.
        again: Whether a part of the stream could be read once more by its place in it; of plain
            JSON the trace then has an outline.

    Raises:
        InputError: Not JSON (``E302``), JSON but no trace (``E303``), no events (``E304``),
            compressed data without one readable event (``E307``), beyond a limit (``E310`` to
            ``E315``).
    """
    health = {} if health is None else health
    stream, compressed = inflate(raw, source, limits, health)
    front = Front(stream, _HEAD)
    # Every event is garbage by the end of its chunk, and none is part of a cycle.
    with paused():
        trace = Reader(front, source, limits, python, health, within, CHUNK).read()
    if compressed or not again:
        trace = replace(trace, outline=None)
    if within is None and (trace.kind == Kind.OTHER).all():
        raise _another_programs(trace, source)
    return trace


def _another_programs(trace: Trace, source: str) -> InputError:
    """``E303``: Chrome's format, which many programs write, and not one event is of torch's."""
    whose = look_at_names(trace.names[code] for code in trace.name[:_LOOKED_AT].tolist())
    return InputError(
        "E303",
        f"{source} is a trace, but none of torch.profiler.",
        why=f"its events are {whose}" if whose else "no event is an operator, a kernel or a range",
        hint="give a trace that torch.profiler's export_chrome_trace wrote",
    )
