"""The blocks of the forward pass, which a person calls layers, and which are the same layer.

A block is a checkpointed sequence, or a sequence of the same forward pass that looks like one
and was not recomputed. Where checkpoints nest with different boundaries (the whole model round
its layers, a layer around its halves), the blocks are the outermost sequences that repeat.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.arrays import gaps, places_of, tally, true_at
from recompute_scan.model import Calls
from recompute_scan.recompute.counts import Counts
from recompute_scan.recompute.spans import Node, Span, forest
from recompute_scan.recompute.structure import OperatorCodes
from recompute_scan.result import Checkpoint
from recompute_scan.trace.columns import Bool, Int64

_Key = tuple[str, int]
# Sequences shorter than this look like too much else, unless they stand in a row with blocks.
SHORTEST_LOOKALIKE = 3
# One operator alone is like too many even there.
_SHORTEST_IN_ROW = 2
# Two layers of one kind differ at most by this in their number of operators.
LIKE = 0.2
# A repeated pattern must make up this much of a forward pass to be its layers.
REPEATS_COVER = 0.5


class Block(Struct, frozen=True):
    """One block in one forward pass.

    Attributes:
        span: Its operators and the checkpoints with its boundary.
        checkpoints: All checkpoints around it, outermost first; empty when there is none.
        batch: The forward pass it belongs to (``Counts.batch``).
        parts: What checkpoints inside it enclose, with all that are around that; what is in
            another comes after it.
    """

    span: Span
    checkpoints: tuple[Checkpoint, ...]
    batch: int
    parts: tuple[Block, ...] = ()

    @property
    def places(self) -> slice:
        """Positions of its operators in ``Counts``."""
        return slice(self.span.first, self.span.last + 1)


def find_blocks(calls: Calls, counts: Counts, spans: Sequence[Span]) -> list[Block]:
    """The blocks of every forward pass, in forward order."""
    code = OperatorCodes(calls)[counts.rows]
    passes = _forward_passes(counts)
    spans_of: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if counts.counted[span.first : span.last + 1].any():
            spans_of[int(counts.batch[span.first])].append(span)
    blocks_of = {
        batch: _blocks_of(forest(spans_of[batch]), code, batch) for batch in sorted(passes)
    }
    return with_lookalikes([block for found in blocks_of.values() for block in found], counts, code)


def with_lookalikes(checkpointed: Sequence[Block], counts: Counts, code: Int64) -> list[Block]:
    """The blocks under checkpoints, with those that look like them, in forward order.

    Without any, the layers are what repeats.

    Args:
        checkpointed: The blocks under checkpoints, of all forward passes.
        counts: The operators of all forward passes.
        code: One number per operator, equal for operators that are alike.
    """
    blocks = list(checkpointed)
    patterns = _patterns(blocks, code)
    blocks_of: dict[int, list[Block]] = defaultdict(list)
    for block in checkpointed:
        blocks_of[block.batch].append(block)
    for batch, here in _forward_passes(counts).items():
        if checkpointed:
            mine = blocks_of[batch]
            blocks += _lookalikes(patterns, mine, code, counts.counted, here, batch)
        else:
            blocks += _repeats(code, here, batch)
    return sorted(blocks, key=lambda block: block.span.first)


def _forward_passes(counts: Counts) -> dict[int, Int64]:
    """Places of the counted operators of each forward pass, by its number."""
    counted = true_at(counts.counted)
    places = places_of(counts.batch[counted])
    return {batch: counted[mine] for batch, mine in places.items()}


def _blocks_of(nodes: list[Node], code: Int64, batch: int) -> list[Block]:
    everything: list[Span] = []

    def collect(node: Node) -> None:
        everything.append(node.span)
        for child in node.children:
            collect(child)

    for node in nodes:
        collect(node)

    def choose(node: Node) -> list[Block]:
        if not node.children or any(_alike(node.span, other, code) for other in everything):
            return [Block(node.span, node.span.checkpoints, batch, _parts(node, batch))]
        # Were it around one of them and little else, they would be one span.
        around = tuple(replace(one, around="several") for one in node.span.checkpoints)
        return [_within(around, block) for child in node.children for block in choose(child)]

    return [_numbered(block) for node in nodes for block in choose(node)]


def _parts(node: Node, batch: int) -> tuple[Block, ...]:
    found: list[Block] = []
    for child in node.children:
        own = tuple(replace(checkpoint, around="part") for checkpoint in child.span.checkpoints)
        inside = (Block(child.span, own, batch), *(_within(own, x) for x in _parts(child, batch)))
        found += (_within(node.span.checkpoints, block) for block in inside)
    return tuple(found)


def _within(around: tuple[Checkpoint, ...], block: Block) -> Block:
    """The block, with these around it too."""
    parts = tuple(_within(around, part) for part in block.parts)
    return replace(block, checkpoints=around + block.checkpoints, parts=parts)


def _numbered(block: Block) -> Block:
    parts = tuple(map(_numbered, block.parts))
    return replace(block, checkpoints=numbered(block.checkpoints), parts=parts)


def numbered(checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    """The same, outermost first, with their depths."""
    return tuple(replace(one, depth=depth) for depth, one in enumerate(checkpoints))


def _alike(one: Span, other: Span, code: Int64) -> bool:
    """Do two disjoint spans begin alike and have about the same length?"""
    if other.first <= one.last and one.first <= other.last:
        return False
    if abs(one.length - other.length) > LIKE * max(one.length, other.length):
        return False
    head = min(one.length, other.length, 8)
    return bool(
        np.array_equal(code[one.first : one.first + head], code[other.first : other.first + head])
    )


def _patterns(blocks: list[Block], code: Int64) -> list[Int64]:
    distinct: dict[bytes, Int64] = {}
    for block in blocks:
        pattern = code[block.span.first : block.span.last + 1]
        if len(pattern) >= _SHORTEST_IN_ROW:
            distinct.setdefault(pattern.tobytes(), pattern)
    # The longest first, so that a sequence is claimed whole.
    return sorted(distinct.values(), key=len, reverse=True)


def _lookalikes(
    patterns: list[Int64],
    blocks: list[Block],
    code: Int64,
    counted: Bool,
    here: Int64,
    batch: int,
) -> list[Block]:
    """Sequences of one forward pass that look like a block, lie in none and have a backward."""
    taken = np.zeros(len(code), np.bool_)
    for block in blocks:
        taken[block.span.first : block.span.last + 1] = True
    found: list[Block] = []
    first, last = int(here[0]), int(here[-1])
    for pattern in patterns:
        starts = true_at(code[first : last + 1] == pattern[0]) + first
        if len(pattern) < SHORTEST_LOOKALIKE:
            starts = _in_row(starts, pattern, blocks, code)
        for start in starts:
            stop = int(start) + len(pattern)
            if stop - 1 > last or taken[start:stop].any() or not counted[start:stop].any():
                continue
            if np.array_equal(code[start:stop], pattern):
                taken[start:stop] = True
                found.append(Block(Span(int(start), stop - 1, ()), (), batch))
    return found


def _in_row(starts: Int64, pattern: Int64, blocks: list[Block], code: Int64) -> Int64:
    """Those starts of the pattern that follow on its blocks no further off than these stand apart,
    in either direction.
    """
    length = len(pattern)
    starts = starts[starts <= len(code) - length]
    for place, kind in enumerate(pattern):
        starts = starts[code[starts + place] == kind]
    alike = starts.tolist()
    row = {block.span.first for block in blocks}.intersection(alike)
    far = min(gaps(np.array(sorted(row), np.int64)).tolist(), default=length)
    for order in (alike, alike[::-1]):
        last = -1 - far
        for start in order:
            if start in row or length <= abs(start - last) <= far:
                row.add(start)
                last = start
    return np.array(sorted(row), np.int64)


def _repeats(code: Int64, here: Int64, batch: int) -> list[Block]:
    """The layers of a forward pass without checkpoints: its longest repeated pattern."""
    part = code[here]
    best: tuple[int, int, int] | None = None  # operators covered, start, period
    for period in _likely_periods(part):
        equal = np.concatenate(([False], part[period:] == part[:-period], [False]))
        edges = true_at(equal[1:] != equal[:-1])
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            covered = (int(end - begin) // period + 1) * period
            if end - begin >= period and (best is None or covered > best[0]):
                best = (covered, int(begin), period)
    if best is None or best[0] < REPEATS_COVER * len(part):
        return []
    covered, begin, period = best
    return [
        Block(Span(int(here[start]), int(here[start + period - 1]), ()), (), batch)
        for start in range(begin, begin + covered, period)
    ]


def _likely_periods(part: Int64) -> list[int]:
    """Distances at which operators of the rarest repeated kinds return, commonest first."""
    order = part.argsort(kind="stable")
    same = part[order][1:] == part[order][:-1]
    distances = gaps(order)[same]
    distances = distances[distances >= SHORTEST_LOOKALIKE]
    values, times = tally(distances)
    return [int(value) for value in values[np.argsort(-times, kind="stable")][:12]]


def group_blocks(calls: Calls, counts: Counts, blocks: Sequence[Block]) -> list[list[Block]]:
    """The blocks of all forward passes, grouped into layers, in forward order.

    The same layer in another pass is the block with the same module name, else with the same
    operators; the first such, the second such, … of each pass belong together.
    """
    groups: dict[_Key, list[Block]] = defaultdict(list)
    places: dict[_Key, list[int]] = defaultdict(list)
    seen: dict[tuple[int, str], int] = defaultdict(int)
    order: dict[int, int] = defaultdict(int)
    for block in blocks:
        identity = block.span.module or operators_of(calls, counts, block)
        key = (identity, seen[block.batch, identity])
        seen[block.batch, identity] += 1
        groups[key].append(block)
        places[key].append(order[block.batch])
        order[block.batch] += 1
    in_order = sorted(groups, key=lambda key: (min(places[key]), key))
    return [part for key in in_order for part in _one_layer_each(counts, groups[key])]


def operators_of(calls: Calls, counts: Counts, block: Block) -> str:
    """The names of a block's operators, a line each."""
    return "\n".join(counts.names(calls, block.places))


def _one_layer_each(counts: Counts, blocks: list[Block]) -> list[list[Block]]:
    """The blocks apart where one step shows them to be those of several layers.

    Two models can have modules of one name: their checkpoints were asked for elsewhere, or run
    differently often in one step.
    """
    kinds: dict[tuple[object, float], list[Block]] = defaultdict(list)
    steps: dict[int, set[tuple[object, float]]] = defaultdict(set)
    highest = counts.highest_of([block.places for block in blocks])
    for block, number in zip(blocks, highest, strict=True):
        sites = tuple(checkpoint.call_site for checkpoint in block.checkpoints)
        kind = (sites, number)
        kinds[kind].append(block)
        steps[int(counts.step[block.places].max())].add(kind)
    apart = any(len(found) > 1 for found in steps.values())
    return list(kinds.values()) if apart else [blocks]
