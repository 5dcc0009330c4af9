"""A trace as columns, the only form in which the rest of the program sees one.

Also how much of a file may be taken in, and what names of torch's own events say.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from recompute_scan.errors import InputError
from recompute_scan.trace.kineto.schema import KIND_NAMES, Kind, Outline

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
        health: Counters of what was repaired, dropped or missing; what each says to a person
            is in :mod:`recompute_scan.trace.health`.
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
        event_bytes: Size of one event, or of what is before the first (``E315``).
        members: Files in an archive (``E316``).
        name_chars: Longer names are cut, and counted as ``names_shortened``.
    """

    inflated_bytes: int = 64 * 2**30
    ratio: int = 250
    ratio_from: int = 16 * 2**20
    depth: int = 500
    events: int = 200_000_000
    distinct: int = 5_000_000
    event_bytes: int = 64 * 2**20
    members: int = 10_000
    name_chars: int = 20_000


DEFAULT_LIMITS = Limits()


def refuse_size(source: str, limit: int) -> InputError:
    """``E310``: the file inflates to more than it may."""
    return _refuse(
        "E310", f"{source} inflates to more than {_size(limit)}.", "--max-inflated-bytes"
    )


def refuse_ratio(source: str, limit: int) -> InputError:
    """``E311``: the file inflates as no trace does."""
    return _refuse(
        "E311",
        f"{source} inflates more than {limit} times, as no trace does.",
        "--max-ratio",
        why="it looks like a file made to fill the memory",
    )


def refuse_depth(source: str, limit: int) -> InputError:
    """``E312``: values nested too deep."""
    return _refuse("E312", f"{source} nests values more than {limit} deep.", "--max-depth")


def refuse_events(source: str, limit: int) -> InputError:
    """``E313``: too many events."""
    return _refuse("E313", f"{source} holds more than {limit:,} events.", "--max-events")


def refuse_distinct(source: str, limit: int, what: str) -> InputError:
    """``E314``: too many distinct names or shapes."""
    return _refuse("E314", f"{source} holds more than {limit:,} {what}.", "--max-distinct")


def refuse_event_size(source: str, limit: int) -> InputError:
    """``E315``: one event, or what is before the first, is too long."""
    return _refuse(
        "E315",
        f"{source} goes on for {_size(limit)} without an event's end.",
        "--max-event-bytes",
        why="it is no trace, or one of its strings was never closed",
    )


def refuse_members(source: str, limit: int) -> InputError:
    """``E316``: too many files in an archive."""
    return _refuse("E316", f"{source} holds more than {limit:,} files.", "--max-members")


def _refuse(code: str, what: str, option: str, why: str | None = None) -> InputError:
    return InputError(code, what, why=why, hint=f"if it is right, lift the limit with {option}")


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
