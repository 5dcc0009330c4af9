"""The blocks of the forward pass, which a person calls layers, and which are the same layer.

A block is a checkpointed sequence, or a sequence of the same forward pass that looks like one
and was not recomputed. Where checkpoints nest with different boundaries (the whole model round
its layers, a layer around its halves), the blocks are the outermost sequences that repeat.

Layers can also differ from the checkpointed blocks, as a decoder's from an encoder's. Operators
that look like no block are a layer where the forward pass repeats them. It has a stem and a head
once, however long they are. A much shorter sequence may be one of several heads, unless it
attends.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import takewhile

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.numpy_tools import median, places_of
from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.alignment import Counts
from recompute_scan.recompute.boundaries import Node, Span, forest
from recompute_scan.recompute.roles import OperatorCodes
from recompute_scan.recompute.sequences import alike
from recompute_scan.result import Checkpoint
from recompute_scan.trace.calls import Calls
from recompute_scan.trace.columns import Bool, Int64

# Many operators that are no layer look like a shorter sequence, except in a row with blocks.
SHORTEST_LOOKALIKE = 3
# Even there too much looks like one operator alone.
_SHORTEST_IN_ROW = 2
# A repeated pattern must make up this much of a forward pass to be its layers.
REPEATS_COVER = 0.5


def patterns_of(spans: Sequence[Span], code: Int64) -> list[Int64]:
    """The different sequences of these, as codes of operators, the longest first."""
    distinct: dict[bytes, Int64] = {}
    for span in spans:
        pattern = code[span.first : span.last + 1]
        if len(pattern) >= _SHORTEST_IN_ROW:
            distinct.setdefault(pattern.tobytes(), pattern)
    # The longest first, so that a sequence is claimed whole.
    return sorted(distinct.values(), key=len, reverse=True)


def lookalikes(
    patterns: Sequence[Int64], known: Sequence[Span], code: Int64, counted: Bool, here: Int64
) -> list[Span]:
    """Sequences of one forward pass that look like a block, lie in none and have a backward.

    ``code`` and ``counted`` are of the operators of all forward passes, ``here`` the places of this
    one's.
    """
    taken = np.zeros(len(code), np.bool_)
    for span in known:
        taken[span.first : span.last + 1] = True
    found: list[Span] = []
    first, last = int(here[0]), int(here[-1])
    for pattern in patterns:
        starts = np.flatnonzero(code[first : last + 1] == pattern[0]) + first
        if len(pattern) < SHORTEST_LOOKALIKE:
            starts = _in_row(starts, pattern, known, code)
        for start in starts[starts + len(pattern) - 1 <= last].tolist():
            mine = slice(start, start + len(pattern))
            free = not taken[mine].any() and counted[mine].any()
            if free and np.array_equal(code[mine], pattern):
                taken[mine] = True
                found.append(Span(start, mine.stop - 1, ()))
    return found


def _in_row(starts: Int64, pattern: Int64, known: Sequence[Span], code: Int64) -> Int64:
    """Those starts of the pattern that follow on its blocks no further off than these stand apart,
    in either direction.
    """
    length = len(pattern)
    starts = starts[starts <= len(code) - length]
    for place, kind in enumerate(pattern):
        starts = starts[code[starts + place] == kind]
    alike = starts.tolist()
    row = {span.first for span in known}.intersection(alike)
    far = min(np.diff(np.array(sorted(row), np.int64)).tolist(), default=length)
    for order in (alike, alike[::-1]):
        last = -1 - far
        for start in order:
            if start in row or length <= abs(start - last) <= far:
                row.add(start)
                last = start
    return np.array(sorted(row), np.int64)


def repeats(code: Int64, here: Int64) -> list[Span]:
    """The layers of a forward pass without checkpoints: its longest repeated pattern."""
    part = code[here]
    best: tuple[int, int, int] | None = None  # operators covered, start, period
    for period in _likely_periods(part):
        equal = np.concatenate(([False], part[period:] == part[:-period], [False]))
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            covered = (int(end - begin) // period + 1) * period
            if end - begin >= period and (best is None or covered > best[0]):
                best = (covered, int(begin), period)
    if best is None or best[0] < REPEATS_COVER * len(part):
        return []
    covered, begin, period = best
    return [
        Span(int(here[start]), int(here[start + period - 1]), ())
        for start in range(begin, begin + covered, period)
    ]


def _likely_periods(part: Int64) -> list[int]:
    """Distances at which operators of the rarest repeated kinds return, commonest first."""
    order = part.argsort(kind="stable")
    distances = np.diff(order)[part[order][1:] == part[order][:-1]]
    times = Counter(sorted(distances[distances >= SHORTEST_LOOKALIKE].tolist()))
    return [distance for distance, _ in times.most_common(12)]


_Key = tuple[str, int]


class Block(Struct, frozen=True):
    """One block in one forward pass.

    Attributes:
        span: Its operators and the checkpoints with its boundary.
        checkpoints: All checkpoints around it, outermost first; empty when there is none.
        batch: The forward pass it belongs to (``Counts.batch``).
        parts: The sequences in checkpoints inside it, with all checkpoints around each. An inner
            one comes after its outer one.
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
    spans_of: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if counts.counted[span.first : span.last + 1].any():
            spans_of[int(counts.batch[span.first])].append(span)
    blocks: list[Block] = []
    around: list[Block] = []
    for batch in forward_passes(counts):
        blocks += _blocks_of(forest(spans_of[batch]), code, batch, around)
    return with_lookalikes(blocks, counts, code, around)


def with_lookalikes(
    checkpointed: Sequence[Block], counts: Counts, code: Int64, around: Sequence[Block] = ()
) -> list[Block]:
    """The blocks under checkpoints, with those that look like them, in forward order.

    Without any, the layers are what repeats. Work that checkpoints around several of them
    enclose is in ``around``, outer ones first: they are around what looks like a block there, too.
    """
    patterns = patterns_of([block.span for block in checkpointed], code)
    alike: list[Block] = []
    blocks_of = _by_pass(checkpointed)
    for batch, here in forward_passes(counts).items():
        if checkpointed:
            mine = [block.span for block in blocks_of[batch]]
            spans = lookalikes(patterns, mine, code, counts.counted, here)
        else:
            spans = repeats(code, here)
        alike += [Block(span, (), batch) for span in spans]
    return sorted((*checkpointed, *_enclosed(alike, around)), key=lambda block: block.span.first)


def _by_pass(blocks: Sequence[Block]) -> dict[int, list[Block]]:
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
    """The blocks, with the checkpoints in ``around`` that hold them; no two overlap."""
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

    def all_of(node: Node) -> Iterator[Node]:
        yield node
        for child in node.children:
            yield from all_of(child)

    everything = [one for node in nodes for one in all_of(node)]
    single = [node.span for node in nodes if not node.children]

    def is_layer(node: Node) -> bool:
        same = (other for other in everything if _alike_spans(node.span, other.span, code))
        first = node.children[0].span
        if not any(_alike_spans(first, other.span, code) for other in node.children[1:]):
            return any(True for _ in same)
        # It holds a row of layers, or is a layer with a row of equal parts.
        names = _modules(node)
        return not any(_alike_spans(first, other, code) for other in single) and any(
            names is None
            or (others := _modules(other)) is None
            or others == names  # weights that are shared
            or holder(others) != holder(names)
            for other in same
        )

    def choose(node: Node, around: tuple[Checkpoint, ...] = ()) -> Iterator[Block]:
        if not node.children or is_layer(node):
            here = around + node.span.checkpoints
            yield Block(node.span, numbered(here), batch, tuple(_parts(node, batch, here)))
            return
        # Were it around one of them and little else, they would be one span.
        module = node.span.module_class
        mine = tuple(
            replace(one, around="several", module_class=module) for one in node.span.checkpoints
        )
        wide.append(Block(node.span, mine, batch))
        for child in node.children:
            yield from choose(child, around + mine)

    return [block for node in nodes for block in choose(node)]


def _modules(node: Node) -> list[str] | None:
    """The modules of the checkpoints inside; ``None`` where there are none, or one is unknown."""
    names = [name for child in node.children if (name := child.span.module)]
    return names if names and len(names) == len(node.children) else None


def holder(modules: Sequence[str]) -> str:
    """The innermost module that holds all of these; empty for the model or of none."""
    levels = zip(*(module.split(".") for module in modules), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len({*names}) == 1, levels))


def _parts(node: Node, batch: int, around: tuple[Checkpoint, ...]) -> Iterator[Block]:
    """The checkpointed parts of a layer; ``around`` has the checkpoints down to the node's own."""
    for child in node.children:
        own = tuple(replace(checkpoint, around="part") for checkpoint in child.span.checkpoints)
        yield Block(child.span, numbered(around + own), batch)
        yield from _parts(child, batch, around + own)


def numbered(checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    """The same, outermost first, with their depths."""
    return tuple(replace(one, depth=depth) for depth, one in enumerate(checkpoints))


def _alike_spans(one: Span, other: Span, code: Int64) -> bool:
    """Do two disjoint spans begin alike and have about the same length?"""
    if other.first <= one.last and one.first <= other.last:
        return False
    return alike(code[one.first : one.last + 1], code[other.first : other.last + 1])


def group_blocks(calls: Calls, counts: Counts, blocks: Sequence[Block]) -> list[list[Block]]:
    """The blocks of all forward passes, grouped into layers, in forward order.

    The same layer in another pass is the block with the same module name, else with the same
    operators; the first such, the second such, … of each pass belong together. A model can be
    called twice before its backward pass: where a module's name comes again behind others, it is
    the same layer, and where it comes again at once, the next of several that share weights.
    """
    groups: dict[_Key, list[Block]] = defaultdict(list)
    first: dict[_Key, int] = {}
    seen, order = Counter[tuple[int, str]](), Counter[int]()
    before: tuple[int, str | None] = (-1, None)
    for block in blocks:
        module = block.span.module
        identity = module or "\n".join(counts.names(calls, block.places))
        if module is not None and before != (block.batch, module):
            seen[block.batch, identity] = 0
        before = block.batch, module
        key = (identity, seen[block.batch, identity])
        seen[block.batch, identity] += 1
        groups[key].append(block)
        first[key] = min(order[block.batch], first.get(key, len(blocks)))
        order[block.batch] += 1
    in_order = sorted(groups, key=lambda key: (first[key], key))
    return [part for key in in_order for part in _one_layer_each(counts, groups[key])]


def _one_layer_each(counts: Counts, blocks: list[Block]) -> list[list[Block]]:
    """The blocks, separated where one step shows that they are several layers.

    Two models can have modules of one name: their checkpoints were asked for elsewhere, or run
    differently often in one step.
    """
    kinds: dict[tuple[object, float], list[Block]] = defaultdict(list)
    steps: dict[int, set[tuple[object, float]]] = defaultdict(set)
    for block in blocks:
        sites = tuple(checkpoint.call_site for checkpoint in block.checkpoints)
        kind = (sites, counts.highest(block.places))
        kinds[kind].append(block)
        steps[int(counts.step[block.places].max())].add(kind)
    apart = any(len(found) > 1 for found in steps.values())
    return list(kinds.values()) if apart else [blocks]


# As much of a block's operators in a row is a layer, or most of one.
_PART = 0.5
# A sequence that takes less of a forward pass is no layer.
_SHARE = 0.05
# One alone may be what a head pools by.
_ATTENTIONS = 2
_PRODUCT_OF_TWO = re.compile(r"aten::(matmul|bmm|baddbmm|einsum)$")


def leaves_layers(calls: Calls, counts: Counts, blocks: Sequence[Block]) -> bool:
    """Are there layers that look like no block?"""
    code = OperatorCodes(calls)[counts.rows]
    # A repeated sequence without a product is a loss's, or a sum, and no layer.
    products = np.array([vocabulary.multiplies(name) for name in counts.names(calls, slice(None))])
    blocks_of = _by_pass(blocks)
    inside = np.zeros(len(code), np.bool_)
    for block in blocks:
        inside[block.places] = True
    seen = set[bytes]()
    for batch, here in forward_passes(counts).items():
        kinds = code[here].tobytes()
        if batch in blocks_of and kinds not in seen:
            seen.add(kinds)
            beside = _beside(code, counts, products, here, inside[here], blocks_of[batch])
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
    products = [at for at, name in enumerate(names) if vocabulary.family_of(name)[0] == "gemm"]
    found = 0
    for at in np.flatnonzero(~covered).tolist():
        family, kind = vocabulary.family_of(names[at])
        if family == "softmax":
            # Attention in parts: of two products, with the softmax of the first between them.
            after = bisect_left(products, at)
            around = [names[place] for place in products[max(after - 1, 0) : after + 1]]
            found += len(around) == 2 and all(map(_PRODUCT_OF_TWO.match, around))
        found += kind == "attention"
    return found >= _ATTENTIONS


def _beside(
    code: Int64,
    counts: Counts,
    products: Bool,
    here: Int64,
    covered: Bool,
    blocks: Sequence[Block],
) -> bool:
    """Does what is as long as half a block return outside of the blocks?"""
    # Of what has a backward, as much as half a block.
    starts = here.searchsorted(sorted(block.span.first for block in blocks))
    stops = here.searchsorted(sorted(block.span.last + 1 for block in blocks))
    length = max(SHORTEST_LOOKALIKE, round(_PART * median(stops - starts)))
    cuts = np.flatnonzero(covered[1:] != covered[:-1]) + 1
    every = np.split(np.arange(len(here)), cuts)
    pieces = [one for one in every if len(one) >= length and not covered[one[0]]]
    # A model that is called twice has its stem and its head twice, around each row of blocks. In
    # layers that hold a row of them each, the stem stands before the first row only.
    ends = np.array([one[-1] for one in pieces], np.int64)
    stem = code[here[: starts[0]]]
    begins = starts[np.unique(ends.searchsorted(starts), return_index=True)[1]]
    most = sum(np.array_equal(code[here[max(0, at - len(stem)) : at]], stem) for at in begins)
    found: dict[bytes, list[Int64]] = defaultdict(list)
    for piece in pieces:
        for place in range(len(piece) - length + 1):
            window = here[piece[place : place + length]]
            same = found[code[window].tobytes()]
            if not same or same[-1][-1] < window[0]:
                same.append(window)
    several = [one for one in found.values() if len(one) > most and products[one[0]].any()]
    if not several:
        return False
    # Layers of a few shapes each, as of a DenseNet, count together.
    layers = np.unique(np.concatenate([each for one in several for each in one]))
    return bool(counts.weight[layers].sum() >= _SHARE * counts.weight[here].sum())
