"""The blocks of the forward pass, which a person calls layers, and which are the same layer.

A block is a checkpointed sequence, or a sequence of the same forward pass that looks like one
and was not recomputed. Where checkpoints nest with different boundaries (the whole model round
its layers, a layer around its halves), the blocks are the outermost sequences that repeat.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.arrays import places_of
from recompute_scan.model import Calls
from recompute_scan.recompute.counts import Counts
from recompute_scan.recompute.lookalikes import lookalikes, patterns_of, repeats
from recompute_scan.recompute.roles import OperatorCodes
from recompute_scan.recompute.spans import Node, Span, forest
from recompute_scan.result import Checkpoint
from recompute_scan.trace.columns import Int64

_Key = tuple[str, int]
# Two layers of one kind differ at most by this in their number of operators.
LIKE = 0.2


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
    passes = forward_passes(counts)
    spans_of: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if counts.counted[span.first : span.last + 1].any():
            spans_of[int(counts.batch[span.first])].append(span)
    blocks: list[Block] = []
    around: list[Block] = []
    for batch in sorted(passes):
        blocks += _blocks_of(forest(spans_of[batch]), code, batch, around)
    return with_lookalikes(blocks, counts, code, around)


def with_lookalikes(
    checkpointed: Sequence[Block], counts: Counts, code: Int64, around: Sequence[Block] = ()
) -> list[Block]:
    """The blocks under checkpoints, with those that look like them, in forward order.

    Without any, the layers are what repeats.

    Args:
        checkpointed: The blocks under checkpoints, of all forward passes.
        counts: The operators of all forward passes.
        code: One number per operator, equal for operators that are alike.
        around: What checkpoints around several of them enclose, outer ones first: they are around
            what looks like a block there, too.
    """
    patterns = patterns_of([block.span for block in checkpointed], code)
    alike: list[Block] = []
    blocks_of = by_pass(checkpointed)
    for batch, here in forward_passes(counts).items():
        if checkpointed:
            mine = [block.span for block in blocks_of[batch]]
            spans = lookalikes(patterns, mine, code, counts.counted, here)
        else:
            spans = repeats(code, here)
        alike += [Block(span, (), batch) for span in spans]
    return sorted((*checkpointed, *_enclosed(alike, around)), key=lambda block: block.span.first)


def by_pass(blocks: Sequence[Block]) -> dict[int, list[Block]]:
    """The blocks of each forward pass, by its number; a pass without any has an empty list."""
    found: dict[int, list[Block]] = defaultdict(list)
    for block in blocks:
        found[block.batch].append(block)
    return found


def forward_passes(counts: Counts) -> dict[int, Int64]:
    """Places of the counted operators of each forward pass, by its number."""
    counted = np.flatnonzero(counts.counted)
    places = places_of(counts.batch[counted])
    return {batch: counted[mine] for batch, mine in places.items()}


def _enclosed(blocks: Sequence[Block], around: Sequence[Block]) -> Iterator[Block]:
    """The blocks, with the checkpoints of those of ``around`` that hold them; none overlap."""
    waiting = sorted(around, key=lambda wide: (-wide.span.first, wide.span.last))
    holding: list[Block] = []
    for block in sorted(blocks, key=lambda block: block.span.first):
        first, last = block.span.first, block.span.last
        while waiting and waiting[-1].span.first <= first:
            wide = waiting.pop()
            while holding and holding[-1].span.last < wide.span.last:
                holding.pop()
            holding.append(wide)
        while holding and holding[-1].span.last < last:
            holding.pop()
        checkpoints = [one for wide in holding for one in wide.checkpoints]
        yield replace(block, checkpoints=numbered(checkpoints))


def _blocks_of(nodes: list[Node], code: Int64, batch: int, wide: list[Block]) -> list[Block]:
    """The blocks of one forward pass; to ``wide`` is added what is around several of them."""
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
        module = node.span.module_class
        around = tuple(
            replace(one, around="several", module_class=module) for one in node.span.checkpoints
        )
        wide.append(Block(node.span, around, batch))
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


def group_blocks(calls: Calls, counts: Counts, blocks: Sequence[Block]) -> list[list[Block]]:
    """The blocks of all forward passes, grouped into layers, in forward order.

    The same layer in another pass is the block with the same module name, else with the same
    operators; the first such, the second such, … of each pass belong together. A model can be
    called twice before its backward pass: where a module's name comes again behind others, it is
    the same layer, and where it comes again at once, the next of several that share weights.
    """
    groups: dict[_Key, list[Block]] = defaultdict(list)
    places: dict[_Key, list[int]] = defaultdict(list)
    seen: dict[tuple[int, str], int] = defaultdict(int)
    order: dict[int, int] = defaultdict(int)
    before: tuple[int, str | None] = (-1, None)
    for block in blocks:
        module = block.span.module
        identity = module or operators_of(calls, counts, block)
        if module is not None and before != (block.batch, module):
            seen[block.batch, identity] = 0
        before = block.batch, module
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
