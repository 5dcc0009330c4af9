"""What checkpoints keep out of memory, seen from the allocations of a recorded step.

A recompute makes again what its checkpoint did not keep, and keeps it for the backward pass that
follows at once. So what the device has more at the end of a recompute than at its beginning is what
the checkpoint saves between the forward pass and the recompute. A reentrant recompute holds its
region's result too, which the next region keeps in any case: there the figure is too high by it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
from msgspec import Struct

from recompute_scan.arrays import median
from recompute_scan.cost.communication import tensors_of
from recompute_scan.cost.saved import saved_by, saves_result
from recompute_scan.recompute.blocks import Block
from recompute_scan.recompute.boundary import same_boundary
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


class Levels(Struct, frozen=True):
    """What the peak gains about where one of two levels of checkpoints goes.

    With both, a backward pass holds the inputs of all outer checkpoints, those of the inner ones
    of one outer checkpoint, and what one inner block saves. Without the inner ones it holds what
    all blocks in one outer checkpoint save; without the outer ones, the inputs of all inner ones.

    Attributes:
        without_inner: Bytes more without the checkpoints inside, at least 0.
        without_outer: Bytes more without those around them, at least 0.
    """

    without_inner: int
    without_outer: int


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


def levels_of(facts: RecomputeFacts) -> Levels | None:
    """What either of two levels of checkpoints keeps out of the peak; ``None`` where unknown.

    Worked out of the shapes that the trace has: a block's input is the first tensor of its first
    operator, and a block saves, for each operator that saves anything, as much as its first tensor
    takes, what two operators save once. Unknown without annotations or shapes, without a second
    level, and with more than two.
    """
    if facts.annotations is None:
        return None
    counts, structure, alignment = facts.counts, facts.structure, facts.alignment
    spans = {(call.first, call.last) for call in facts.annotations.calls}
    # What runs without gradients saves nothing there, and bears no annotations of what is inside:
    # that shows in the recompute.
    rows = counts.rows.copy()
    for recompute, begin in zip(alignment.recomputes, alignment.begins.tolist(), strict=True):
        places = alignment.places[begin : begin + len(recompute.again)]
        graded = structure.number[recompute.again] >= 0
        rows[places[graded]] = recompute.again[graded]
        above = int(facts.calls.parent[recompute.engine])
        if above >= 0 and structure.engine[above] >= 0:
            span = int(places.min()), int(places.max())
            if not any(same_boundary(span, other) for other in spans):
                spans.add(span)
    of_pass: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for first, last in sorted(spans):
        if counts.counted[first : last + 1].any():
            of_pass[int(counts.batch[first])].append((first, last))
    saves = saved_by(facts.calls, structure.role) > 0
    saves = np.append(0, saves.cumsum())
    result = np.array([saves_result(name) for name in counts.names(facts.calls, slice(None))])
    sizes: dict[int, int] = {}

    def taken(place: int) -> int:
        code = int(facts.calls.dims[facts.counts.rows[place]])
        if code not in sizes:
            tensors = tensors_of(facts.trace.signatures[code])
            sizes[code] = next((number * width for number, width in tensors if width), 0)
        return sizes[code]

    def saved(first: int, last: int) -> int:
        mine = rows[first : last + 1]
        own = saves[mine + 1 + facts.calls.size[mine]] > saves[mine]
        # A result that the next operator saves as its input is there once.
        own[:-1] &= ~(own[1:] & result[first:last])
        return sum(taken(place) for place in (first + np.flatnonzero(own)).tolist())

    found = [_levels_of(spans, taken, saved) for spans in of_pass.values()]
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return None
    return Levels(max(one.without_inner for one in known), max(one.without_outer for one in known))


def _levels_of(
    spans: list[tuple[int, int]],
    taken: Callable[[int], int],
    saved: Callable[[int, int], int],
) -> Levels | None:
    """The same for the checkpointed calls of one forward pass."""
    inside = {
        outer: [one for one in spans if one != outer and outer[0] <= one[0] and one[1] <= outer[1]]
        for outer in spans
    }
    several = {outer: inner for outer, inner in inside.items() if len(inner) > 1}
    if not several or any(inside[one] for inner in several.values() for one in inner):
        return None
    inputs = {outer: sum(taken(first) for first, _ in inner) for outer, inner in several.items()}
    blocks = {outer: [saved(*one) for one in inner] for outer, inner in several.items()}
    if not all(all(sizes) for sizes in blocks.values()) or not all(inputs.values()):
        return None
    most = max(max(sizes) for sizes in blocks.values())
    around = sum(taken(first) for first, _ in several)
    both = around + max(inputs[outer] + max(blocks[outer]) for outer in several)
    alone = around + max(sum(sizes) for sizes in blocks.values())
    return Levels(max(0, alone - both), max(0, sum(inputs.values()) + most - both))


def _held(facts: RecomputeFacts, block: Block, layer: int, ts: Int64, total: Int64) -> Held | None:
    """From the recompute that keeps most: of nested checkpoints the outer one's keeps little."""
    calls = facts.calls
    rows = facts.counts.rows[block.places]
    size, first_start, done = 0, None, -1
    for recompute in facts.alignment.recomputes:
        again = recompute.again[np.isin(recompute.original, rows)]
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
