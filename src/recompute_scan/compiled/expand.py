"""Compiled calls of a trace opened up into their operators, with what the compiler's graphs say.

A trace shows how often a compiled call ran again as a whole: a checkpoint around it does that. The
graphs show what its backward runs again by itself. An operator ran again as often as both together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.annotations import COMPILED
from recompute_scan.compiled.graphs import CompiledSite, Partition
from recompute_scan.frameworks.registry import recognise
from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.boundaries import Span
from recompute_scan.recompute.counts import Counts, Float64
from recompute_scan.recompute.layers import Block, numbered, with_lookalikes
from recompute_scan.recompute.roles import OperatorCodes
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.result import Checkpoint
from recompute_scan.trace.calls import Calls
from recompute_scan.trace.columns import Bool, Int64

# A checkpoint inside compiled code is around the same work as one outside when it holds this much.
_SAME_WORK = 0.8

Parts = tuple[Partition, ...]


class Opened(Struct, frozen=True):
    """The forward operators of a trace with those of compiled calls in the place of these.

    Attributes:
        facts: The facts with these as ``counts`` and ``blocks``.
        own: For each entry: how often the compiler runs it again by its own choice, for free.
        parts: For each forward operator of the trace that is compiled its graphs, by place.
    """

    facts: RecomputeFacts
    own: Int64
    parts: Mapping[int, Parts]


def find_parts(
    facts: RecomputeFacts, partitions: Mapping[str, Parts]
) -> tuple[dict[int, Parts], tuple[str, ...]]:
    """The graphs of each forward operator that is compiled, and the calls that have none here.

    Returns:
        Graphs by place in ``facts.counts``; names of the calls whose graphs are unknown.
    """
    calls, counts = facts.calls, facts.counts
    function = calls.matching(vocabulary.COMPILED_FUNCTION)[calls.name]
    region = np.array(
        [bool(vocabulary.COMPILED_REGION.match(name)) for name in calls.names], np.bool_
    )
    again = dict(
        zip(facts.alignment.original.tolist(), facts.alignment.again.tolist(), strict=True)
    )
    found: dict[int, Parts] = {}
    unknown: dict[str, None] = {}
    for place in np.flatnonzero(counts.counted).tolist():
        row = int(counts.rows[place])
        inside = _functions(calls, function, row)
        if not len(inside) and row in again:
            # Under a reentrant checkpoint the first run needs no gradient, and the second does.
            inside = _functions(calls, function, again[row])
        if not len(inside):
            continue
        parts = _parts_of(calls, region, inside, partitions)
        if parts is None:
            unknown[calls.names[calls.name[row]]] = None
        else:
            found[place] = parts
    return found, tuple(unknown)


def _functions(calls: Calls, function: Bool, row: int) -> Int64:
    return row + np.flatnonzero(function[row : row + 1 + int(calls.size[row])])


def _parts_of(
    calls: Calls, region: Bool, functions: Int64, partitions: Mapping[str, Parts]
) -> Parts | None:
    """The graphs that these calls run: those of one range are its graphs, one after the other."""
    found: list[Partition] = []
    turn: dict[int, int] = {}
    for row in functions.tolist():
        holder = int(calls.parent[row])
        while holder >= 0 and not region[calls.name[holder]]:
            holder = int(calls.parent[holder])
        name = calls.names[calls.name[holder]] if holder >= 0 else ""
        parts = partitions.get(name.partition(": ")[2], ())
        number = turn.get(holder, 0)
        if number >= len(parts) or not parts[number].readable:
            return None
        turn[holder] = number + 1
        found.append(parts[number])
    return tuple(found)


def open_up(facts: RecomputeFacts, parts: Mapping[int, Parts]) -> Opened:
    """The facts with the operators of compiled calls; see :class:`Opened`."""
    counts = facts.counts
    sizes = np.ones(len(counts.rows), np.int64)
    for place, graphs in parts.items():
        sizes[place] = max(1, sum(len(one.repeats.nodes) for one in graphs))
    begins = np.concatenate(([0], sizes.cumsum()))
    source = np.repeat(np.arange(len(sizes)), sizes)
    share = np.ones(len(source))
    asked, own = np.zeros((2, len(source)), np.int64)
    names = [facts.calls.names[code] for code in facts.calls.name[counts.rows[source]].tolist()]
    code = OperatorCodes(facts.calls)[counts.rows[source]]
    kinds: dict[tuple[str, str], int] = {}
    beyond = int(code.max(initial=0)) + 1
    for place, graphs in parts.items():
        at = int(begins[place])
        each = 1 / len(graphs)
        for graph in graphs:
            for node, weight, times, for_it in zip(
                graph.repeats.nodes, graph.weights, graph.repeats.times, graph.asked, strict=True
            ):
                share[at], asked[at], own[at] = weight * each, for_it, times - for_it
                names[at] = f"aten::{node.operator}"
                code[at] = beyond + kinds.setdefault((node.target, node.type), len(kinds))
                at += 1
    opened = _opened_counts(facts, source, share, asked, tuple(names))
    blocks = _blocks(facts, parts, begins, opened)
    whole = replace(facts, counts=opened, blocks=tuple(with_lookalikes(blocks, opened, code)))
    return Opened(whole, own, parts)


def _opened_counts(
    facts: RecomputeFacts,
    source: Int64,
    share: np.ndarray[tuple[int], np.dtype[np.float64]],
    asked: Int64,
    names: tuple[str, ...],
) -> Counts:
    counts = facts.counts
    outer = counts.multiplicity[source]
    weight = counts.weight[source] * share
    backwards = facts.alignment.passes[source]
    # As a recompute inside a graph has no range of its own, it is priced as its forward.
    inside = asked * backwards * weight
    beyond = np.maximum(0, outer + asked - 1) - np.maximum(0, outer - 1)
    return Counts(
        rows=counts.rows[source],
        multiplicity=outer + asked,
        runs=counts.runs[source] + asked * backwards,
        weight=weight,
        again=counts.again[source] * share + inside,
        redundant=counts.redundant[source] * share + beyond * backwards * weight,
        counted=counts.counted[source],
        step=counts.step[source],
        batch=counts.batch[source],
        redundant_rows=counts.redundant_rows,
        operators=names,
    )


def _blocks(
    facts: RecomputeFacts, parts: Mapping[int, Parts], begins: Int64, opened: Counts
) -> list[Block]:
    """The blocks under checkpoints: those of the trace, and those inside compiled calls."""
    found: list[Block] = []
    inner = {place: checkpoints_in(graphs, int(begins[place])) for place, graphs in parts.items()}
    covered: set[int] = set()
    for block in facts.blocks:
        if not block.checkpoints:
            continue
        first, last = block.span.first, block.span.last
        span = replace(block.span, first=int(begins[first]), last=int(begins[last + 1]) - 1)
        inside = [span_ for place in range(first, last + 1) for span_ in inner.get(place, [])]
        covered.update(range(first, last + 1))
        found += around(replace(block, span=span, parts=()), inside, opened.weight)
    for place, spans in inner.items():
        if place not in covered and opened.counted[begins[place]]:
            batch = int(opened.batch[begins[place]])
            found += [Block(one, numbered(one.checkpoints), batch) for one in spans]
    return found


def around(block: Block, inside: Sequence[Span], weight: Float64) -> list[Block]:
    """The blocks that a checkpoint makes with those inside it: one where both are around the same.

    Args:
        block: What the outer checkpoint is around.
        inside: The checkpoints in it.
        weight: Time of each operator.
    """
    own = weight[block.places].sum()
    held = sum(weight[one.first : one.last + 1].sum() for one in inside)
    if not inside or (len(inside) == 1 and held < _SAME_WORK * own):
        return [block]
    if len(inside) == 1:
        return [replace(block, checkpoints=numbered(block.checkpoints + inside[0].checkpoints))]
    return [
        Block(one, numbered(block.checkpoints + one.checkpoints), block.batch) for one in inside
    ]


def checkpoints_in(graphs: Parts, begin: int) -> list[Span]:
    """The checkpoints inside these graphs, as spans of entries that begin with this one."""
    spans: list[Span] = []
    for graph in graphs:
        groups = [node.group for node in graph.repeats.nodes]
        order = list(dict.fromkeys(group for group in groups if group is not None))
        for turn, group in enumerate(order):
            mine = [place for place, one in enumerate(groups) if one == group]
            same = len(order) == len(graph.sites)
            site = graph.sites[turn] if same else _only(graph.sites)
            names = [graph.modules[place] for place in mine]
            spans.append(
                Span(
                    first=begin + mine[0],
                    last=begin + mine[-1],
                    checkpoints=(_checkpoint(site),),
                    module=_common([name for name in names if name is not None]),
                )
            )
        begin += len(groups)
    return spans


def _checkpoint(site: CompiledSite | None) -> Checkpoint:
    """A compiled checkpoint: the compiler makes no difference between the variants."""
    told = Checkpoint(depth=0, variant=None, options=(COMPILED,))
    if site is None:
        return told
    return replace(told, mechanism=recognise(site.place).name, call_site=site.line)


def _only(sites: tuple[CompiledSite, ...]) -> CompiledSite | None:
    return sites[0] if len(set(sites)) == 1 else None


def _common(modules: list[str]) -> str | None:
    """The innermost module that holds all of these."""
    if not modules:
        return None
    paths = [module.split(".") for module in modules]
    shared = []
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared) or None
