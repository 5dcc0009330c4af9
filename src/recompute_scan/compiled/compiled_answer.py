"""The verdict on a step with compiled code: what the trace shows and what the graphs say."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from recompute_scan.compiled.checkpoints_of_code import checkpoints_around
from recompute_scan.compiled.opened import Opened, Parts, find_parts, open_up
from recompute_scan.compiled.partitions import Partition, graph_breaks, read_partitions
from recompute_scan.compiled.repeated import PRODUCTS, Repeats
from recompute_scan.compiled.structured import VERSION, Record
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.counts import Counts
from recompute_scan.recompute.cross_check import PlainCounts, Tally
from recompute_scan.recompute.facts import RecomputeFacts
from recompute_scan.recompute.verdict import Judgement, judge
from recompute_scan.result import (
    Checkpoint,
    CompiledCode,
    CompiledGraph,
    CompiledRecompute,
    EvidenceLevel,
)
from recompute_scan.trace.columns import Bool, Int64

NAME = "matrix products of compiled code"
_PRODUCT = re.compile(rf"aten::({'|'.join(sorted(PRODUCTS))})$")
_RANDOM = ("dropout", "rand", "bernoulli", "normal", "uniform", "multinomial", "inductor_seeds")
UNKNOWN = (
    "Part of the backward pass is compiled, and the compiler's graphs for {names} are not here or "
    "do not tell what is recomputed (before torch 2.10 they do not name checkpoints)."
)


class Graphs(Struct, frozen=True):
    """What a run or a folder tells of compiled code.

    Attributes:
        partitions: The graphs by ``frame/version``.
        breaks: Why the compiler left code to Python.
        budget: The memory budget that the process had, where it is known and a graph has none.
        around: The checkpoints around compiled code, where its stack is known: by
            ``frame/version``, outermost first.
        torch: The version of torch; ``None`` where that is not known.
        whole_backward: Whether compiled autograd compiled a backward pass as a whole.
    """

    partitions: Mapping[str, Parts]
    breaks: tuple[str, ...] = ()
    budget: float | None = None
    around: Mapping[str, tuple[Checkpoint, ...]] = field(default_factory=dict)
    torch: str | None = None
    whole_backward: bool = False


def graphs_from(records: Sequence[Record], budget: float | None = None) -> Graphs:
    """The graphs that the compiler's records hold."""
    return Graphs(
        read_partitions(records),
        graph_breaks(records),
        budget,
        checkpoints_around(records),
        next((one.payload.strip()[:40] for one in records if one.name == VERSION), None),
        any("compiled_autograd_id" in one.fields for one in records),
    )


class Answered(Struct, frozen=True):
    """The facts of a trace with the verdict on its compiled code.

    Attributes:
        facts: As they were, with the verdict and the plain count.
        opened: The same with compiled calls opened up into their operators.
        code: What the result says of compiled code.
        seen: Whether the trace shows the products that the graphs have: two counts.
        priced: Whether the trace shows all recomputes, so that they can be priced from it.
    """

    facts: RecomputeFacts
    opened: RecomputeFacts
    code: CompiledCode
    seen: bool
    priced: bool


def answer_compiled(facts: RecomputeFacts, graphs: Graphs) -> Answered | None:
    """The verdict with the graphs; ``None`` where no trained call is compiled."""
    parts, unknown = find_parts(facts, graphs.partitions)
    if not parts and not unknown:
        code = CompiledCode((), (), graphs.breaks)
        return Answered(facts, facts, code, seen=True, priced=True) if graphs.breaks else None
    if unknown:
        code = _code(facts, parts, graphs, unknown)
        return Answered(_without(facts, unknown), facts, code, seen=False, priced=True)
    second = _count_products(facts, parts)
    opened = open_up(facts, parts)
    judgement = _judge(replace(opened.facts, plain=second.plain), opened)
    by_operators: EvidenceLevel = "annotated" if facts.annotations is not None else "autograd"
    told = replace(
        facts,
        judgement=judgement,
        plain=second.plain,
        level=by_operators,
        compiled=None,
    )
    whole = replace(told, counts=opened.facts.counts, blocks=opened.facts.blocks)
    asked = any(any(graph.asked) for each in parts.values() for graph in each)
    return Answered(
        told, whole, _code(facts, parts, graphs, ()), seen=second.seen, priced=not asked
    )


def _without(facts: RecomputeFacts, unknown: tuple[str, ...]) -> RecomputeFacts:
    """The facts where graphs are missing: no verdict, unless the trace alone shows doubling."""
    judgement = facts.judgement
    elsewhere = judgement.verdict == "inconclusive" and facts.compiled is None
    if elsewhere or judgement.verdict == "doubled" or facts.level == "kernels":
        return facts
    names = ", ".join(unknown[:3])
    return replace(facts, judgement=Judgement("inconclusive", UNKNOWN.format(names=names)))


def _judge(facts: RecomputeFacts, opened: Opened) -> Judgement:
    judgement = judge(
        facts.calls,
        facts.structure,
        facts.counts,
        facts.blocks,
        facts.alignment,
        facts.plain,
        None,
    )
    return with_own(judgement, facts.counts, opened.own)


def with_own(judgement: Judgement, counts: Counts, own: Int64) -> Judgement:
    """The verdict with the compiler's own cheap recomputes, which make it ``partial`` at most."""
    if judgement.verdict != "none" or not own.any():
        return judgement
    counted = counts.counted
    all_of_it = replace(counts, multiplicity=counts.multiplicity + own)
    weight, again = counts.weight[counted], own[counted] > 0
    return Judgement(
        "partial",
        None,
        all_of_it.highest(counted),
        all_of_it.mean(counted),
        float(weight[again].sum() / weight.sum()) if weight.sum() else float(again.mean()),
    )


def _code(
    facts: RecomputeFacts, parts: Mapping[int, Parts], graphs: Graphs, unknown: tuple[str, ...]
) -> CompiledCode:
    steps = max(1, facts.complete_count)
    calls = Counter(id(graph) for each in parts.values() for graph in each)
    used = {id(graph): graph for each in parts.values() for graph in each}
    return CompiledCode(
        graphs=tuple(
            code_of(graph, calls[key] / steps, graphs.budget) for key, graph in used.items()
        ),
        unknown=unknown,
        graph_breaks=graphs.breaks,
    )


def code_of(graph: Partition, calls: float | None, budget: float | None) -> CompiledGraph:
    """What the result says of one graph, which is called so often per step."""
    repeats = graph.repeats
    budget = graph.budget if graph.budget is not None else budget
    free = [t > 0 and not a for t, a in zip(repeats.times, graph.asked, strict=True)]
    return CompiledGraph(
        name=graph.compile_id,
        calls_per_step=calls,
        operators=len(repeats.nodes),
        recomputed=sum(times > 0 for times in repeats.times),
        free=sum(free),
        saved_bytes=repeats.saved_bytes,
        memory_budget=budget,
        checkpoints=tuple(site.line for site in graph.sites),
        recomputes=_recomputes(graph, repeats, budget),
    )


def _recomputes(
    graph: Partition, repeats: Repeats, budget: float | None
) -> tuple[CompiledRecompute, ...]:
    own = "budget" if budget is not None and budget < 1 else "compiler"
    kinds: Counter[CompiledRecompute] = Counter()
    for node, module, times, asked in zip(
        repeats.nodes, graph.modules, repeats.times, graph.asked, strict=True
    ):
        if times:
            random = any(word in node.operator for word in _RANDOM)
            kind = CompiledRecompute(
                operator=node.operator,
                module=module,
                source=node.file,
                operators=1,
                times=times,
                why="checkpoint" if node.group is not None else own,  # type: ignore[arg-type]
                free=not asked,
                random=random,
                # Inductor draws from a seed: the same numbers, unless the seed is drawn again.
                redrawn=random and not node.state and node.operator != "inductor_random",
            )
            kinds[kind] += 1
    return tuple(replace(kind, operators=number) for kind, number in kinds.items())


class _SecondCount(Struct, frozen=True):
    """The two counts side by side.

    Attributes:
        plain: The plain count, with the products of compiled code where the trace shows them.
        seen: Whether the trace shows them: then two counts have to agree.
    """

    plain: PlainCounts
    seen: bool


def _count_products(facts: RecomputeFacts, parts: Mapping[int, Parts]) -> _SecondCount:
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
    return _SecondCount(PlainCounts(tuple(tallies)), seen)


def _products(counter: Mapping[str, int]) -> int:
    return sum(number for name, number in counter.items() if name in PRODUCTS)


def _inside_compiled(facts: RecomputeFacts) -> Bool:
    """For each call: does compiled backward code run it itself?"""
    calls, structure = facts.calls, facts.structure
    node = calls.matching(words.COMPILED_NODE)[calls.name]
    engine: Int64 = np.maximum(structure.engine, 0).astype(np.int64)
    held = (structure.engine >= 0) & node[engine]
    again = np.isin(structure.top, facts.alignment.again)
    return np.asarray(held & ~again, np.bool_)


def _explained(facts: RecomputeFacts, tally: Tally, ran: Bool) -> Tally:
    """The tally: of what it cannot explain, compiled code ran so much by its graphs."""
    named = np.array([name == tally.name for name in facts.calls.names], np.bool_)
    more = int((named[facts.calls.name] & ran).sum())
    return replace(tally, again=tally.again + min(more, max(0, tally.inside - tally.again)))
