"""Matrix products of compiled code counted in the trace, beside those in the compiler's graphs."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.arrays import among
from recompute_scan.compiled.opened import Parts
from recompute_scan.compiled.repeated import PRODUCTS
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.cross_check import PlainCounts, Tally
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.trace.columns import Bool, Int64

NAME = "matrix products of compiled code"
_PRODUCT = re.compile(rf"aten::({'|'.join(sorted(PRODUCTS))})$")


class SecondCount(Struct, frozen=True):
    """The two counts side by side.

    Attributes:
        plain: The plain count, with the products of compiled code where the trace shows them.
        seen: Whether the trace shows them: then two counts have to agree.
    """

    plain: PlainCounts
    seen: bool


def count_products(facts: RecomputeFacts, parts: Mapping[int, Parts]) -> SecondCount:
    """The plain count with what compiled code runs by its graphs."""
    counts = facts.counts
    first = gradients = again = 0
    for place, graphs in parts.items():
        backwards = int(facts.alignment.backwards[place])
        for graph in graphs:
            pairs = zip(graph.repeats.nodes, graph.repeats.times, strict=True)
            times = [number for node, number in pairs if node.operator in PRODUCTS]
            first += len(times)
            again += backwards * sum(times)
            gradients += backwards * _products(graph.repeats.gradients)
    ran = _inside_compiled(facts)
    product = facts.calls.matching(_PRODUCT)[facts.calls.name]
    outside = sum(
        int(product[row : row + 1 + int(facts.calls.size[row])].sum())
        for row in counts.rows[list(parts)].tolist()
    )
    inside = int((product & ran).sum())
    seen = first > 0 and outside == first
    tallies = [_explained(facts, tally, ran) for tally in facts.plain.tallies]
    if seen:
        tallies.insert(0, Tally(NAME, outside, inside - gradients, 0, first, again))
    return SecondCount(PlainCounts(tuple(tallies)), seen)


def _products(counter: Mapping[str, int]) -> int:
    return sum(number for name, number in counter.items() if name in PRODUCTS)


def _inside_compiled(facts: RecomputeFacts) -> Bool:
    """For each call: does compiled backward code run it itself?"""
    calls, structure = facts.calls, facts.structure
    node = calls.matching(words.COMPILED_NODE)[calls.name]
    engine: Int64 = np.maximum(structure.engine, 0).astype(np.int64)
    held = (structure.engine >= 0) & node[engine]
    again = among(structure.top, facts.alignment.again)
    return np.asarray(held & ~again, np.bool_)


def _explained(facts: RecomputeFacts, tally: Tally, ran: Bool) -> Tally:
    """The tally: of what it cannot explain, compiled code ran so much by its graphs."""
    named = np.array([name == tally.name for name in facts.calls.names], np.bool_)
    more = int((named[facts.calls.name] & ran).sum())
    return replace(tally, again=tally.again + min(more, max(0, tally.inside - tally.again)))
