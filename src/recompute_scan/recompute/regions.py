"""Blocks of all steps folded into the rows that a person reads: one per layer."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from recompute_scan.recompute.blocks import Block
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.result import Checkpoint, Region
from recompute_scan.trace.columns import Int64

# Within one block, a multiplicity counts when this share of the block's time has it.
MATTERS_IN_BLOCK = 0.01
_SHOWN_OPERATORS = 4

_Key = tuple[str, int]


def group_blocks(facts: RecomputeFacts) -> list[list[Block]]:
    """The blocks of all forward passes, grouped into layers, in forward order.

    The same layer in another pass is the block with the same module name, else with the same
    operators; the first such, the second such, … of each pass belong together.
    """
    groups: dict[_Key, list[Block]] = defaultdict(list)
    places: dict[_Key, list[int]] = defaultdict(list)
    seen: dict[tuple[int, str], int] = defaultdict(int)
    order: dict[int, int] = defaultdict(int)
    for block in facts.blocks:
        identity = block.span.module or _operators(facts, block)
        key = (identity, seen[block.batch, identity])
        seen[block.batch, identity] += 1
        groups[key].append(block)
        places[key].append(order[block.batch])
        order[block.batch] += 1
    in_order = sorted(groups, key=lambda key: (min(places[key]), key))
    return [part for key in in_order for part in _one_layer_each(facts, groups[key])]


def _one_layer_each(facts: RecomputeFacts, blocks: list[Block]) -> list[list[Block]]:
    """The blocks apart where one step shows them to be those of several layers.

    Two models can have modules of one name: their checkpoints were asked for elsewhere, or run
    differently often in one step.
    """
    counts = facts.counts
    kinds: dict[tuple[object, float], list[Block]] = defaultdict(list)
    steps: dict[int, set[tuple[object, float]]] = defaultdict(set)
    for block in blocks:
        places = facts.places(block)
        sites = tuple(checkpoint.call_site for checkpoint in block.checkpoints)
        kind = (sites, counts.highest(places, MATTERS_IN_BLOCK))
        kinds[kind].append(block)
        steps[int(counts.step[places].max())].add(kind)
    apart = any(len(found) > 1 for found in steps.values())
    return list(kinds.values()) if apart else [blocks]


def list_regions(facts: RecomputeFacts, scale: float = 1.0) -> tuple[Region, ...]:
    """One row per layer, averaged over the complete steps, in forward order.

    Args:
        facts: What ran again.
        scale: Factor from recorded to unprofiled times.
    """
    per_step_ms = scale / 1e6 / max(1, facts.complete_count)
    steps = max(1, facts.complete_count)
    counts = facts.counts
    regions = []
    for ordinal, blocks in enumerate(group_blocks(facts)):
        places = [facts.places(block) for block in blocks]
        recomputes = [counts.highest(p, MATTERS_IN_BLOCK) for p in places]
        everywhere = np.concatenate(places)
        first = blocks[0]
        regions.append(
            Region(
                ordinal=ordinal,
                module=first.span.module,
                module_class=first.span.module_class,
                signature=_signature(facts, first),
                forward_runs_per_step=len(blocks) / steps,
                recompute_runs_per_backward=float(np.mean(recomputes)),
                mean_recompute=counts.mean(everywhere),
                forward_ms_per_step=float(counts.weight[everywhere].sum()) * per_step_ms,
                recompute_ms_per_step=float(counts.again[everywhere].sum()) * per_step_ms,
                redundant_ms_per_step=float(counts.redundant[everywhere].sum()) * per_step_ms,
                checkpoints=_commonest(blocks),
                recomputes_by_step=_by_step(facts, places, recomputes),
            )
        )
    return tuple(regions)


def _by_step(
    facts: RecomputeFacts, places: list[Int64], recomputes: list[float]
) -> tuple[float | None, ...]:
    found: list[list[float]] = [[] for _ in facts.steps]
    for place, number in zip(places, recomputes, strict=True):
        # operators in no step have -1; a block has some in a complete one
        found[int(facts.counts.step[place].max())].append(number)
    return tuple(float(np.mean(numbers)) if numbers else None for numbers in found)


def _commonest(blocks: list[Block]) -> tuple[Checkpoint, ...]:
    return Counter(block.checkpoints for block in blocks).most_common(1)[0][0]


def _operators(facts: RecomputeFacts, block: Block) -> str:
    calls = facts.calls
    return "\n".join(calls.names[calls.name[row]] for row in facts.counts.rows[facts.places(block)])


def _signature(facts: RecomputeFacts, block: Block) -> str:
    names = [name.removeprefix("aten::") for name in _operators(facts, block).split("\n")]
    shown = list(dict.fromkeys(names))
    more = ", …" if len(shown) > _SHOWN_OPERATORS else ""
    return f"{len(names)} operators: {', '.join(shown[:_SHOWN_OPERATORS])}{more}"
