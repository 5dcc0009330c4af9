"""What checkpoints keep out of memory, seen from the allocations of a recorded step.

A recompute makes again what its checkpoint did not keep, and keeps it for the backward pass that
follows at once. So what the device has more at the end of a recompute than at its beginning is what
the checkpoint saves between the forward pass and the recompute. A reentrant recompute holds its
region's result too, which the next region keeps in any case: there the figure is too high by it.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from recompute_scan.arrays import among, median
from recompute_scan.recompute.blocks import Block
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.trace.allocations import Allocations
from recompute_scan.trace.columns import Int64


class Held(Struct, frozen=True):
    """What one run of a region would hold if it were not checkpointed.

    Attributes:
        layer: Place of its region among all, in forward order.
        size: Bytes.
        start: End of its forward run, ns.
        end: Start of its recompute, from which on it holds them today too, ns.
    """

    layer: int
    size: int
    start: int
    end: int


class Footprint(Struct, frozen=True):
    """The memory of one device over the recorded steps.

    Attributes:
        device: Number of the GPU, -1 for the host.
        ts: When it changed, ns, ascending.
        allocated: Bytes that were allocated from then on; on the host beyond those when
            recording began.
        peak_reserved: Most that torch held of the device, bytes; ``None`` where not told.
        held: All checkpointed runs.
        modules: Name of each layer's module, ``None`` where not known.
    """

    device: int
    ts: Int64
    allocated: Int64
    peak_reserved: int | None
    held: tuple[Held, ...]
    modules: tuple[str | None, ...]

    @property
    def peak_allocated(self) -> int:
        """Most that was allocated at once, bytes."""
        return int(self.allocated.max(initial=0))

    def saved(self, layer: int) -> int | None:
        """Bytes that the layer's checkpoint saves in one micro-batch; the median of all."""
        sizes = [held.size for held in self.held if held.layer == layer]
        return int(median(sizes)) if sizes else None


def measure_memory(facts: RecomputeFacts, allocations: Allocations) -> Footprint:
    """The footprint of the device that the regions' tensors lie on.

    Args:
        facts: What ran again in the trace that the allocations are of.
        allocations: At least one.
    """
    devices, places = np.unique(allocations.device, return_inverse=True)
    traffic = np.bincount(places, weights=np.abs(allocations.size).astype(np.float64))
    traffic[devices < 0] *= (devices >= 0).sum() == 0  # a GPU, where one is in use
    device = int(devices[np.argmax(traffic)])
    mine = allocations.device == device
    ts, size = allocations.ts[mine], allocations.size[mine]
    allocated = allocations.allocated[mine]
    if device < 0 or (allocated < 0).any():
        # The host's total goes on over all recordings of a process, with gaps between them.
        allocated = size.cumsum()
    most = int(allocations.reserved[mine].max(initial=-1)) if device >= 0 else -1
    layers = facts.layers
    total = np.concatenate(([0], size.cumsum()))
    held = [
        one
        for layer, blocks in enumerate(layers)
        for block in blocks
        if (one := _held(facts, block, layer, ts, total)) is not None
    ]
    return Footprint(
        device=device,
        ts=ts,
        allocated=allocated,
        peak_reserved=most if most > 0 else None,
        held=tuple(held),
        modules=tuple(blocks[0].span.module for blocks in layers),
    )


def _held(facts: RecomputeFacts, block: Block, layer: int, ts: Int64, total: Int64) -> Held | None:
    """From the recompute that keeps most: of nested checkpoints the outer one's keeps little."""
    calls = facts.calls
    rows = facts.counts.rows[block.places]
    size, first_start, done = 0, None, -1
    for recompute in facts.alignment.recomputes:
        again = recompute.again[among(recompute.original, rows)]
        if not len(again):
            continue
        first, last = int(again[0]), int(again[-1])
        begin = int(calls.start[first])
        if first == recompute.again[0] and recompute.engine != done:
            # State of random numbers is put aside before the first operator, and back after.
            begin = int(calls.start[recompute.engine])
        done = recompute.engine
        following = last + int(calls.size[last]) + 1
        # What the recompute's own frames held is released before the next operator begins.
        same = following < len(calls) and calls.thread[following] == calls.thread[last]
        end = int(calls.start[following]) if same else int(calls.end[last])
        at = ts.searchsorted([begin, end])
        size = max(size, int(total[at[1]] - total[at[0]]))
        first_start = begin if first_start is None else min(first_start, begin)
    if first_start is None:
        return None
    return Held(layer, size, int(calls.end[rows].max()), first_start)
