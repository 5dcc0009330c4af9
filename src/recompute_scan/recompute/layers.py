"""Which blocks of all forward passes are the same layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from recompute_scan.model import Calls
from recompute_scan.recompute.blocks import Block
from recompute_scan.recompute.counts import Counts

# Within one block, a multiplicity counts when this share of the block's time has it.
MATTERS_IN_BLOCK = 0.01

_Key = tuple[str, int]


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
    highest = counts.highest_of([block.places for block in blocks], MATTERS_IN_BLOCK)
    for block, number in zip(blocks, highest, strict=True):
        sites = tuple(checkpoint.call_site for checkpoint in block.checkpoints)
        kind = (sites, number)
        kinds[kind].append(block)
        steps[int(counts.step[block.places].max())].add(kind)
    apart = any(len(found) > 1 for found in steps.values())
    return list(kinds.values()) if apart else [blocks]
