"""Who held a GPU's memory at its peak, as a memory snapshot tells it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

# By the frames of the stack. ``kept``: a policy of a selective checkpoint keeps it. ``checkpoint``:
# made inside a checkpointed call, and not freed with it. ``unknown``: the stack is not known, or
# is the backward thread's, which has no Python frames.
HeldKind = Literal[
    "kept", "checkpoint", "recompute", "forward", "backward", "optimizer", "other", "unknown"
]


class HeldBy(Struct, frozen=True):
    """Bytes at the peak that one line asked for, the innermost outside torch; empty if unknown."""

    kind: HeldKind
    site: str
    bytes: int
    blocks: int


class MemorySnapshot(Struct, frozen=True):
    """One device of one snapshot.

    Attributes:
        file: Name of the snapshot.
        device: Number of the GPU.
        peak_bytes: Most bytes in use that its history shows.
        end_bytes: Bytes in use when it was taken.
        reserved_bytes: What the allocator held of the device then.
        events: Allocations and releases in its history; 0 where none was recorded.
        out_of_memory: Requests that failed.
        by_kind: Bytes at the peak, by the stack.
        held: The largest holders by line, of all of ``by_kind``.
    """

    file: str
    device: int
    peak_bytes: int
    end_bytes: int
    reserved_bytes: int
    events: int
    out_of_memory: int
    by_kind: dict[str, int]
    held: tuple[HeldBy, ...]
