"""The verdict on compiled code.

The verdict on a step with compiled code: what the trace shows and what the graphs say.

The verdict on compiled code from the compiler's graphs alone: no trace says what ran when.

The checkpoints around compiled code, by the stacks of its compilation, and those in it, by line.

A trace shows how often a compiled call ran again as a whole. Where there is none, torch's
structured trace still tells who called the code when it was compiled: calls of the checkpoint
function among them are checkpoints around it.

The graphs name the line that calls torch's checkpoint, by its whole path. A recorded run knows
lines of the user's own code by shorter names, and where a library's checkpoints were switched on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby, takewhile

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from recompute_scan.compiled.expand import (
    Opened,
    Parts,
    around,
    checkpoints_in,
    find_parts,
    open_up,
)
from recompute_scan.compiled.graphs import (
    PRODUCTS,
    Partition,
    Repeats,
    graph_breaks,
    read_partitions,
)
from recompute_scan.compiled.logs import VERSION, CompileFrame, Record
from recompute_scan.frameworks.registry import recognise
from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.boundaries import Span
from recompute_scan.recompute.checks import PlainCounts, Tally
from recompute_scan.recompute.counts import Counts
from recompute_scan.recompute.layers import Block, with_lookalikes
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.recompute.verdict import Judgement, judge, weigh
from recompute_scan.result import (
    Checkpoint,
    CompiledCode,
    CompiledGraph,
    CompiledRecompute,
    EvidenceLevel,
    Region,
    Variant,
)
from recompute_scan.result.run_record import SwitchedOn
from recompute_scan.trace.columns import Bool, Int64

_CHECKPOINT = ("torch/utils/checkpoint.py", "checkpoint")
# Its decorator, which keeps the compiler out of it: nothing else that has one calls models.
_DISABLED = ("torch/_compile.py", "inner")
_DISABLES = ("torch/_dynamo/eval_frame.py", "_fn")
# What the reentrant variant calls: `apply` is no Python code from torch 2.14 on.
_REENTRANT = ("torch/autograd/function.py", "apply"), ("torch/utils/checkpoint.py", "forward")
_FILES = tuple(file for file, _ in _REENTRANT)
_BACKWARD = ("torch/autograd/graph.py", "_engine_run_backward")


def checkpoints_around(records: Iterable[Record]) -> Mapping[str, tuple[Checkpoint, ...]]:
    """By ``frame/version`` the checkpoints around the first call, outermost first.

    Code whose stack is not known is not among them. What is compiled in the backward pass, because
    a reentrant checkpoint ran it without gradients before, has those of that first run.
    """
    found: dict[str, tuple[Checkpoint, ...]] = {}
    first: dict[str, tuple[Checkpoint, ...]] = {}
    for record in records:
        key, stack = record.compile_id, record.stack
        if key is None or not stack:
            continue
        frame = key.partition("/")[0]
        if any(_is(one, _BACKWARD) for one in stack):
            if frame in first:
                found[key] = first[frame]
        else:
            found[key] = first[frame] = _around(stack)
    return found


def reruns(checkpoints: Sequence[Checkpoint]) -> int:
    """How often what all of these are around runs again in one backward pass.

    Early stop makes one of non-reentrant checkpoints that are directly around one another
    (docs/how-it-works.md, "Doubling is not nesting").
    """
    runs = groupby(one.variant for one in checkpoints)
    return sum(1 if variant == "non-reentrant" else len(list(same)) for variant, same in runs)


def _around(stack: Sequence[CompileFrame]) -> tuple[Checkpoint, ...]:
    found: list[Checkpoint] = []
    for place, frame in enumerate(stack):
        if not _is(frame, _DISABLED) or not place:
            continue
        # The code's own frame is the last; torch leaves frames between out where they are few.
        inside = [one for one in stack[place + 1 : -1] if not _is(one, _DISABLES)]
        if inside and not _is(inside[0], _CHECKPOINT):
            continue
        asked = stack[place - 1]
        torchs = takewhile(lambda one: one.file.endswith(_FILES), inside)
        entered = any(_is(one, where) for one in torchs for where in _REENTRANT)
        variant: Variant = "reentrant" if entered else "non-reentrant"
        found.append(
            Checkpoint(
                depth=len(found),
                variant=variant,
                mechanism=recognise(f"{asked.file}:{asked.function}").name,
                call_site=f"{asked.file}:{asked.line}",
            )
        )
    return tuple(found)


def _is(frame: CompileFrame, place: tuple[str, str]) -> bool:
    return frame.function == place[1] and frame.file.endswith(place[0])


def with_call_sites(
    regions: Sequence[Region], known: Collection[str], switched_on: Sequence[SwitchedOn]
) -> tuple[Region, ...]:
    """The regions, with the call sites that a run record has for their compiled checkpoints.

    Args:
        regions: The blocks.
        known: Call sites that the run record knows.
        switched_on: What was switched on, and where.
    """

    def sited(checkpoint: Checkpoint) -> Checkpoint:
        site = checkpoint.call_site
        if site is None or site in known:
            return checkpoint
        switches = {one.site for one in switched_on if one.mechanism == checkpoint.mechanism}
        same = [*switches] or [one for one in known if site.endswith(f"/{one}")]
        return replace(checkpoint, call_site=same[0]) if len(same) == 1 and same[0] else checkpoint

    return tuple(
        replace(region, checkpoints=tuple(map(sited, region.checkpoints))) for region in regions
    )


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
    node = calls.matching(vocabulary.COMPILED_NODE)[calls.name]
    engine: Int64 = np.maximum(structure.engine, 0).astype(np.int64)
    held = (structure.engine >= 0) & node[engine]
    again = np.isin(structure.top, facts.alignment.again)
    return np.asarray(held & ~again, np.bool_)


def _explained(facts: RecomputeFacts, tally: Tally, ran: Bool) -> Tally:
    """The tally: of what it cannot explain, compiled code ran so much by its graphs."""
    named = np.array([name == tally.name for name in facts.calls.names], np.bool_)
    more = int((named[facts.calls.name] & ran).sum())
    return replace(tally, again=tally.again + min(more, max(0, tally.inside - tally.again)))


_NOTHING = (
    "The compiler's logs have no graph of a backward pass (everything that trains ran in Python, "
    "or the compiler's backend makes none), and there is no trace."
)
_EMPTY = "The compiled graphs hold no operator of a forward pass: there is nothing to count."


class Alone(Struct, frozen=True):
    """What graphs say without a trace.

    Attributes:
        judgement: The verdict on compiled code.
        code: What the result says of it.
        surrounded: Whether it is known of every graph what checkpoints are around it.
    """

    judgement: Judgement
    code: CompiledCode
    surrounded: bool


def answer_alone(graphs: Graphs) -> Alone:
    """The verdict that the graphs come to, as if each of them were called once."""
    parts = [part for each in graphs.partitions.values() for part in each]
    unknown = tuple(dict.fromkeys(part.compile_id for part in parts if not part.readable))
    readable = tuple(code_of(part, None, graphs.budget) for part in parts if part.readable)
    code = CompiledCode(readable, unknown, graphs.breaks)
    surrounded = all(part.compile_id in graphs.around for part in parts)
    if not parts or unknown:
        reason = UNKNOWN.format(names=", ".join(unknown[:3])) if parts else _NOTHING
        return Alone(Judgement("inconclusive", reason), code, surrounded)
    entries = _Entries(parts, [reruns(graphs.around.get(one.compile_id, ())) for one in parts])
    if not entries.counts.counted.any():
        return Alone(Judgement("inconclusive", _EMPTY), code, surrounded)
    blocks = with_lookalikes(_blocks(parts, entries, graphs), entries.counts, entries.kinds)
    judgement = weigh(entries.counts, blocks, entries.counts.operators or ())
    judgement = with_own(judgement, entries.counts, entries.own)
    return Alone(judgement, code, surrounded)


def answer_without_backward(facts: RecomputeFacts, graphs: Graphs) -> Answered | None:
    """The same where a trace has a forward pass, and compiled autograd has made one graph of the
    backward pass, in which no autograd nodes are told apart; ``None`` for any other trace.
    """
    if not graphs.whole_backward or bool(facts.counts.counted.any()):
        return None
    alone = answer_alone(graphs)
    told = replace(facts, judgement=alone.judgement, level="graphs", compiled=None)
    return Answered(told, told, alone.code, seen=False, priced=False)


class _Entries:
    """The operators of all graphs, one after the other."""

    def __init__(self, parts: Sequence[Partition], outer: Sequence[int]) -> None:
        sizes = [len(part.repeats.nodes) for part in parts]
        self.begins = np.cumsum([0, *sizes])
        asked = np.array([number for part in parts for number in part.asked], np.int64)
        times = np.array([number for part in parts for number in part.repeats.times], np.int64)
        runs = asked + np.repeat(np.array(outer, np.int64), sizes)
        whole, zero = len(asked), np.zeros(len(asked))
        known: dict[tuple[str, str], int] = {}
        nodes = [node for part in parts for node in part.repeats.nodes]
        self.own: Int64 = times - asked
        self.kinds: Int64 = np.array(
            [known.setdefault((node.target, node.type), len(known)) for node in nodes], np.int64
        )
        self.counts = Counts(
            rows=np.arange(whole),
            multiplicity=runs.astype(np.float64),
            runs=runs,
            weight=np.array([cost for part in parts for cost in part.costs], np.float64),
            again=zero,
            redundant=zero,
            counted=np.ones(whole, np.bool_),
            step=np.zeros(whole, np.int64),
            batch=np.zeros(whole, np.int64),
            redundant_rows=np.zeros(0, np.int64),
        )


def _blocks(parts: Sequence[Partition], entries: _Entries, graphs: Graphs) -> list[Block]:
    """What checkpoints are around: inside graphs, and whole graphs."""
    found: list[Block] = []
    for part, begin, end in zip(parts, entries.begins[:-1], entries.begins[1:], strict=True):
        inside = checkpoints_in((part,), int(begin))
        outside = graphs.around.get(part.compile_id, ())
        if outside and end > begin:
            whole = Block(Span(int(begin), int(end) - 1, ()), outside, 0)
            found += around(whole, inside, entries.counts.weight)
        else:
            found += [Block(one, one.checkpoints, 0) for one in inside]
    return found
