"""Blocks of all steps folded into the rows that a person reads: one per layer."""

from __future__ import annotations

from collections import Counter

import numpy as np

from recompute_scan.recompute.blocks import Block
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.recompute.layers import MATTERS_IN_BLOCK, operators_of
from recompute_scan.result import Checkpoint, Region

_SHOWN_OPERATORS = 4


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
    for ordinal, blocks in enumerate(facts.layers):
        places = [block.places for block in blocks]
        recomputes = counts.highest_of(places, MATTERS_IN_BLOCK)
        everywhere = np.concatenate([np.arange(p.start, p.stop) for p in places])
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
    facts: RecomputeFacts, places: list[slice], recomputes: list[float]
) -> tuple[float | None, ...]:
    found: list[list[float]] = [[] for _ in facts.steps]
    for place, number in zip(places, recomputes, strict=True):
        # operators in no step have -1; a block has some in a complete one
        found[int(facts.counts.step[place].max())].append(number)
    return tuple(float(np.mean(numbers)) if numbers else None for numbers in found)


def _commonest(blocks: list[Block]) -> tuple[Checkpoint, ...]:
    return Counter(block.checkpoints for block in blocks).most_common(1)[0][0]


def _signature(facts: RecomputeFacts, block: Block) -> str:
    names = [
        name.removeprefix("aten::")
        for name in operators_of(facts.calls, facts.counts, block).split("\n")
    ]
    shown = list(dict.fromkeys(names))
    more = ", …" if len(shown) > _SHOWN_OPERATORS else ""
    return f"{len(names)} operators: {', '.join(shown[:_SHOWN_OPERATORS])}{more}"
