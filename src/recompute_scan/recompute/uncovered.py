"""Layers of another kind than the checkpointed blocks: those of a decoder behind an encoder.

What looks like no block is no lookalike of one. It is a layer all the same where the forward pass
has it again and again; it has a stem and a head once, however long they are. What is much shorter
than a block may be one of several heads, unless it attends.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from recompute_scan.arrays import median
from recompute_scan.model import Calls
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.blocks import Block, by_pass, forward_passes
from recompute_scan.recompute.counts import Counts
from recompute_scan.recompute.lookalikes import SHORTEST_LOOKALIKE
from recompute_scan.recompute.roles import OperatorCodes
from recompute_scan.trace.columns import Bool, Int64

# As much of a block's operators in a row is a layer, or most of one.
_PART = 0.5
# What takes less of a forward pass is no layer.
_SHARE = 0.05
# One alone may be what a head pools by.
_ATTENTIONS = 2
_PRODUCT_OF_TWO = re.compile(r"aten::(matmul|bmm|baddbmm|einsum)$")


def leaves_layers(calls: Calls, counts: Counts, blocks: Sequence[Block]) -> bool:
    """Are there layers that look like none of the blocks?"""
    code = OperatorCodes(calls)[counts.rows]
    blocks_of = by_pass(blocks)
    seen = set[bytes]()
    for batch, here in forward_passes(counts).items():
        kinds = code[here].tobytes()
        if batch in blocks_of and kinds not in seen:
            seen.add(kinds)
            inside = np.zeros(len(code), np.bool_)
            for block in blocks_of[batch]:
                inside[block.places] = True
            beside = _beside(code, counts, here, inside[here], blocks_of[batch])
            if beside or _attend(calls, counts, here, inside[here]):
                return True
    return False


def _attend(calls: Calls, counts: Counts, here: Int64, covered: Bool) -> bool:
    """Is there attention outside of the blocks, more than once?"""
    weight = counts.weight[here]
    if weight[~covered].sum() < _SHARE * weight.sum():
        return False
    every = counts.names(calls, slice(None))
    names = [every[place] for place in here.tolist()]
    kinds = {name: words.family_of(name) for name in {*names}}
    products = [at for at, name in enumerate(names) if kinds[name][0] == "gemm"]
    found = 0
    for at in np.flatnonzero(~covered).tolist():
        family, kind = kinds[names[at]]
        if family == "softmax":
            # Attention in parts: of two products, with the softmax of the first between them.
            after = bisect_left(products, at)
            around = [names[place] for place in products[max(after - 1, 0) : after + 1]]
            found += len(around) == 2 and all(map(_PRODUCT_OF_TWO.match, around))
        found += kind == "attention"
    return found >= _ATTENTIONS


def _beside(
    code: Int64, counts: Counts, here: Int64, covered: Bool, blocks: Sequence[Block]
) -> bool:
    """Does what is as long as half a block return outside of the blocks?"""
    # Of what has a backward, as much as half a block.
    starts = here.searchsorted(sorted(block.span.first for block in blocks))
    stops = here.searchsorted(sorted(block.span.last + 1 for block in blocks))
    length = max(SHORTEST_LOOKALIKE, round(_PART * median(stops - starts)))
    cuts = np.flatnonzero(covered[1:] != covered[:-1]) + 1
    rest = [one for one in np.split(np.arange(len(here)), cuts) if not covered[one[0]]]
    pieces = [one for one in rest if len(one) >= length]
    # A model that is called twice has its stem and its head twice, around each row of blocks.
    ends = np.array([one[-1] for one in pieces], np.int64)
    rows = len(set(ends.searchsorted(starts).tolist()))
    most = 1 if rows == len(starts) else rows
    found: dict[bytes, list[Int64]] = defaultdict(list)
    for piece in pieces:
        for place in range(len(piece) - length + 1):
            window = here[piece[place : place + length]]
            same = found[code[window].tobytes()]
            if not same or same[-1][-1] < window[0]:
                same.append(window)
    whole = float(counts.weight[here].sum())
    return any(
        len(same) > most and counts.weight[np.concatenate(same)].sum() >= _SHARE * whole
        for same in found.values()
    )
