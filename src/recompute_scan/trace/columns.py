"""A trace as columns: the only form in which the rest of the program sees one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from recompute_scan.trace.kineto.schema import KIND_NAMES, Kind
from recompute_scan.trace.outline import Outline

__all__ = ["KIND_NAMES", "Bool", "Int8", "Int16", "Int32", "Int64", "Ints", "Kind", "Trace"]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Int16 = npt.NDArray[np.int16]
Int8 = npt.NDArray[np.int8]
# Whole numbers of any width.
Ints = npt.NDArray[np.signedinteger[Any]]
Bool = npt.NDArray[np.bool_]


class Trace(Struct, frozen=True):
    """One process's trace. Every array has one entry per event, in file order.

    Numbers have 32 bits unless one of the column needs 64.

    Attributes:
        name: Code into ``names``.
        kind: A :class:`Kind`.
        thread: Code into ``threads``: the host thread, or the device stream's row.
        ts: Start, in ns on the trace's own clock.
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
        health: Counters of what was repaired, dropped or missing; what each says to a person
            is in :mod:`recompute_scan.trace.health`.
        left_out: Events of the file that are sound but not here: arrows, marks without a
            duration, and Python frames unless they were asked for.
        cut_at: Where the file was cut among the host's calls: start of the last one that was
            read, in ns. A step that ends later was not read whole. ``None`` where all of
            the host's calls are there.
        outline: Which parts of the file hold which times; ``None`` where it is compressed.
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

    def __len__(self) -> int:
        return len(self.ts)
