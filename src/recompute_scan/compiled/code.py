"""The verdict on compiled code, from a trace and the compiler's graphs or from the graphs alone.

A trace shows how often a compiled call ran again as a whole: a checkpoint around it does that. The
graphs show which operators its backward pass runs again. An operator ran again as often as both
together, so compiled calls are opened up into their operators.

Without a trace, torch's structured trace has the stack on which each function was compiled: calls
of the checkpoint function on that stack are checkpoints around the compiled code.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby, takewhile

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from recompute_scan.annotations import COMPILED
from recompute_scan.compiled.graphs import (
    PRODUCTS,
    CompiledSite,
    Partition,
    graph_breaks,
    read_partitions,
)
from recompute_scan.compiled.logs import VERSION, CompileFrame, Record
from recompute_scan.frameworks.pytorch import CHECKPOINT_FILE, RUN_BACKWARD
from recompute_scan.frameworks.registry import recognise
from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.alignment import Counts
from recompute_scan.recompute.boundaries import Span
from recompute_scan.recompute.checks import PlainCounts, Tally, plainly_counted
from recompute_scan.recompute.evaluations import twins_of
from recompute_scan.recompute.layers import Block, holder, numbered, with_lookalikes
from recompute_scan.recompute.roles import OperatorCodes
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
from recompute_scan.trace.calls import Calls
from recompute_scan.trace.columns import Bool, Float64, Int64

# A checkpoint inside compiled code is around the same work as one outside when it holds this much.
_SAME_WORK = 0.8

Parts = tuple[Partition, ...]


def find_parts(
    facts: RecomputeFacts, partitions: Mapping[str, Parts]
) -> tuple[dict[int, Parts], tuple[str, ...]]:
    """The graphs of each forward operator that is compiled, and the calls that have none here.

    Returns:
        Graphs by place in ``facts.counts``; names of the calls that have unknown graphs.
    """
    calls, counts = facts.calls, facts.counts
    function = calls.where(vocabulary.COMPILED_FUNCTION.match)
    region = calls.names_where(vocabulary.COMPILED_REGION.match)
    ran = facts.alignment
    again = dict(zip(ran.original.tolist(), ran.again.tolist(), strict=True))
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
            unknown[calls.called(row)] = None
        else:
            found[place] = parts
    return found, tuple(unknown)


def _functions(calls: Calls, function: Bool, row: int) -> Int64:
    return row + np.flatnonzero(function[row : row + 1 + int(calls.size[row])])


def _parts_of(
    calls: Calls, region: Bool, functions: Int64, partitions: Mapping[str, Parts]
) -> Parts | None:
    """The graphs that these calls run; the calls in one range run its graphs in order."""
    found: list[Partition] = []
    turn: dict[int, int] = {}
    for row in functions.tolist():
        holder = int(calls.parent[row])
        while holder >= 0 and not region[calls.name[holder]]:
            holder = int(calls.parent[holder])
        name = calls.called(holder) if holder >= 0 else ""
        parts = partitions.get(name.partition(": ")[2], ())
        number = turn.get(holder, 0)
        if number >= len(parts) or not parts[number].readable:
            return None
        turn[holder] = number + 1
        found.append(parts[number])
    return tuple(found)


def open_up(facts: RecomputeFacts, parts: Mapping[int, Parts]) -> tuple[RecomputeFacts, Int64]:
    """The facts with compiled calls replaced by their operators, in ``counts`` and ``blocks``.

    Returns:
        The facts; and for each entry how often the compiler runs it again by its choice, for free.
    """
    counts = facts.counts
    sizes = np.ones(len(counts.rows), np.int64)
    for place, graphs in parts.items():
        sizes[place] = max(1, sum(len(one.repeats.nodes) for one in graphs))
    begins = np.concatenate(([0], sizes.cumsum()))
    source = np.repeat(np.arange(len(sizes)), sizes)
    share = np.ones(len(source))
    asked, own = np.zeros((2, len(source)), np.int64)
    counted = facts.counts.counted[source]
    names = [facts.calls.names[code] for code in facts.calls.name[counts.rows[source]].tolist()]
    code = OperatorCodes(facts.calls)[counts.rows[source]]
    kinds: dict[tuple[str, str], int] = {}
    beyond = int(code.max(initial=0)) + 1
    for place, graphs in parts.items():
        at = int(begins[place])
        each = 1 / len(graphs)
        for graph in graphs:
            ran = graph.repeats
            for node, weight, times, trains, for_it in zip(
                ran.nodes, graph.weights, ran.times, ran.trains, graph.asked, strict=True
            ):
                share[at], asked[at], own[at] = weight * each, for_it, times - for_it
                counted[at] &= trains
                names[at] = f"aten::{node.operator}"
                code[at] = beyond + kinds.setdefault((node.target, node.type), len(kinds))
                at += 1
    opened = _opened_counts(facts, source, share, asked, counted, tuple(names))
    blocks = _opened_blocks(facts, parts, begins, opened)
    lookalikes = tuple(with_lookalikes(blocks, opened, code))
    return replace(facts, counts=opened, blocks=lookalikes), own


def _opened_counts(
    facts: RecomputeFacts,
    source: Int64,
    share: np.ndarray[tuple[int], np.dtype[np.float64]],
    asked: Int64,
    counted: Bool,
    names: tuple[str, ...],
) -> Counts:
    counts = facts.counts
    outer = counts.m[source]
    weight = counts.weight[source] * share
    backwards = facts.alignment.passes[source]
    # A recompute inside a graph has no range in the trace: it is priced as its forward.
    inside = asked * backwards * weight
    beyond = np.maximum(0, outer + asked - 1) - np.maximum(0, outer - 1)
    return Counts(
        rows=counts.rows[source],
        m=outer + asked,
        runs=counts.runs[source] + asked * backwards,
        weight=weight,
        designed=np.zeros(len(source), np.int64),
        recompute_ns=counts.recompute_ns[source] * share + inside,
        redundant_ns=counts.redundant_ns[source] * share + beyond * backwards * weight,
        counted=counted,
        step=counts.step[source],
        batch=counts.batch[source],
        flight=counts.flight[source],
        redundant_rows=counts.redundant_rows,
        operators=names,
    )


def _opened_blocks(
    facts: RecomputeFacts, parts: Mapping[int, Parts], begins: Int64, opened: Counts
) -> list[Block]:
    """The blocks under checkpoints, in the trace and inside compiled calls."""
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
        if place not in covered and facts.counts.counted[place]:
            batch = int(opened.batch[begins[place]])
            found += [Block(one, numbered(one.checkpoints), batch) for one in spans]
    return found


def around(block: Block, inside: Sequence[Span], weight: Float64) -> list[Block]:
    """The blocks that a checkpoint makes with those inside it: one where both are around the same.

    Operators are weighed by their time.
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
            only = graph.sites[0] if len(set(graph.sites)) == 1 else None
            site = graph.sites[turn] if same else only
            modules = [module for place in mine if (module := graph.modules[place]) is not None]
            spans.append(
                Span(
                    first=begin + mine[0],
                    last=begin + mine[-1],
                    checkpoints=(_compiled_checkpoint(site),),
                    module=holder(modules) or None,
                )
            )
        begin += len(groups)
    return spans


def _compiled_checkpoint(site: CompiledSite | None) -> Checkpoint:
    """A compiled checkpoint: the compiler makes no difference between the variants."""
    known = Checkpoint(depth=0, variant=None, options=(COMPILED,))
    if site is None:
        return known
    return replace(known, mechanism=recognise(site.place).name, call_site=site.line)


_CHECKPOINT = (CHECKPOINT_FILE, "checkpoint")
# Its decorator, which keeps the compiler out of it: nothing else that has one calls models.
_DISABLED = ("torch/_compile.py", "inner")
_DISABLES = ("torch/_dynamo/eval_frame.py", "_fn")
# The reentrant variant calls these; `apply` is no Python code from torch 2.14 on.
_REENTRANT = ("torch/autograd/function.py", "apply"), (CHECKPOINT_FILE, "forward")
_FILES = tuple(file for file, _ in _REENTRANT)
_BACKWARD = ("torch/autograd/graph.py", RUN_BACKWARD)


def checkpoints_around(records: Iterable[Record]) -> Mapping[str, tuple[Checkpoint, ...]]:
    """By ``frame/version`` the checkpoints around the first call, outermost first.

    Code without a known stack is left out. A reentrant checkpoint runs code without gradients
    first, and the backward pass compiles it again: it has the checkpoints of the first run.
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

    The graphs name the line that calls torch's checkpoint, by its whole path. A recorded run has
    shorter names for the user's files, and knows where a library's checkpoints were switched on.
    """
    files = {one.rpartition(":")[0] for one in known}

    def sited(checkpoint: Checkpoint) -> Checkpoint:
        site = checkpoint.call_site
        if site is None or site in known:
            return checkpoint
        switches = {one.site for one in switched_on if one.mechanism == checkpoint.mechanism}
        path, _, line = site.rpartition(":")
        library = path.partition("/site-packages/")[2]
        mine = [one for one in files if path.endswith(f"/{one}") and one == (library or one)]
        same = [*switches] or [f"{one}:{line}" for one in sorted(mine, key=len)[-1:]]
        return replace(checkpoint, call_site=same[0]) if len(same) == 1 and same[0] else checkpoint

    return tuple(
        replace(region, checkpoints=tuple(map(sited, region.checkpoints))) for region in regions
    )


NAME = "matrix products of compiled code"
_PRODUCT = re.compile(rf"aten::({'|'.join(sorted(PRODUCTS))})$")
_RANDOM = ("dropout", "rand", "bernoulli", "normal", "uniform", "multinomial", "inductor_seeds")
UNKNOWN = (
    "Part of the backward pass is compiled, and the compiler's graphs for {names} are missing or "
    "do not show what is recomputed (before torch 2.10 they do not name checkpoints)."
)


class Graphs(Struct, frozen=True):
    """The compiler's records of a run or a folder.

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
    plain, seen = _count_products(facts, parts)
    opened, own = open_up(facts, parts)
    judgement = judge(replace(opened, plain=plain, compiled=None, annotations=None))
    judgement = with_own(judgement, opened.counts, own)
    by_operators: EvidenceLevel = "annotated" if facts.annotations is not None else "autograd"
    answered = replace(facts, judgement=judgement, plain=plain, level=by_operators, compiled=None)
    whole = replace(answered, counts=opened.counts, blocks=opened.blocks)
    asked = any(any(graph.asked) for each in parts.values() for graph in each)
    code = _code(facts, parts, graphs, ())
    return Answered(answered, whole, code, seen=seen, priced=not asked)


def _unknown(names: tuple[str, ...]) -> Judgement:
    return Judgement("inconclusive", UNKNOWN.format(names=", ".join(names[:3])))


def _without(facts: RecomputeFacts, unknown: tuple[str, ...]) -> RecomputeFacts:
    """The facts where graphs are missing: no verdict, unless the trace alone shows doubling."""
    judgement = facts.judgement
    elsewhere = judgement.verdict == "inconclusive" and facts.compiled is None
    if elsewhere or judgement.verdict == "doubled" or facts.level == "kernels":
        return facts
    return replace(facts, judgement=_unknown(unknown))


def with_own(judgement: Judgement, counts: Counts, own: Int64) -> Judgement:
    """The verdict with the compiler's own cheap recomputes, which make it ``partial`` at most."""
    counted = counts.counted
    if judgement.verdict != "none" or not own[counted].any():
        return judgement
    all_of_it = replace(counts, m=counts.m + own)
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
    """One graph as the result shows it, with its calls per step."""
    repeats = graph.repeats
    budget = graph.budget if graph.budget is not None else budget
    return CompiledGraph(
        name=graph.compile_id,
        calls_per_step=calls,
        operators=len(repeats.nodes),
        recomputed=sum(times > 0 for times in repeats.times),
        free=sum(t > 0 and not a for t, a in zip(repeats.times, graph.asked, strict=True)),
        saved_bytes=repeats.saved_bytes,
        memory_budget=budget,
        checkpoints=tuple(site.line for site in graph.sites),
        recomputes=_recomputes(graph, budget),
    )


def _recomputes(graph: Partition, budget: float | None) -> tuple[CompiledRecompute, ...]:
    repeats = graph.repeats
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


def _count_products(facts: RecomputeFacts, parts: Mapping[int, Parts]) -> tuple[PlainCounts, bool]:
    """The plain count with the products that compiled code runs by its graphs.

    Also whether the trace shows these products: then two counts have to agree.
    """
    counts = facts.counts
    first = gradients = again = 0
    for place, graphs in parts.items():
        backwards = int(facts.alignment.backwards[place])
        for graph in graphs:
            pairs = zip(graph.repeats.nodes, graph.repeats.times, strict=True)
            times = [number for node, number in pairs if node.operator in PRODUCTS]
            first += len(times)
            again += backwards * sum(times)
            products = (graph.repeats.gradients[name] for name in PRODUCTS)
            gradients += backwards * sum(products)
    ran = _inside_compiled(facts)
    product = facts.calls.where(_PRODUCT.match)
    outside = int(facts.calls.sums(product, counts.rows[list(parts)]).sum())
    inside = int((product & ran).sum())
    seen = first > 0 and outside == first
    missed = ran & ~twins_of(facts.calls)
    missed[plainly_counted(facts.structure)] = False
    tallies = [_explained(facts, tally, ran, missed) for tally in facts.plain.tallies]
    if seen:
        # Where a checkpoint around the code calls it again, the operators show that.
        last = inside == gradients and any(one.inside for one in tallies)
        at = len(tallies) if last else 0
        tallies.insert(at, Tally(NAME, outside, inside - gradients, 0, first, again))
    return PlainCounts(tuple(tallies)), seen


def _inside_compiled(facts: RecomputeFacts) -> Bool:
    """For each call: does compiled backward code run it itself?"""
    calls, structure = facts.calls, facts.structure
    node = calls.where(vocabulary.COMPILED_NODE.match)
    engine: Int64 = np.maximum(structure.engine, 0).astype(np.int64)
    held = (structure.engine >= 0) & node[engine]
    again = np.isin(structure.top, facts.alignment.again)
    return np.asarray(held & ~again, np.bool_)


def _explained(facts: RecomputeFacts, tally: Tally, ran: Bool, missed: Bool) -> Tally:
    """The tally with all operators that compiled backward code ran by its graphs.

    Under a reentrant checkpoint the plain count has ``missed`` them: the others of the name are
    inside a numbered function, and these are not.
    """
    named = facts.calls.where(tally.name.__eq__)
    inside = tally.inside + int((named & missed).sum())
    again = tally.again + min(int((named & ran).sum()), max(0, inside - tally.again))
    return replace(tally, inside=inside, again=again)


_NOTHING = (
    "The compiler's logs have no graph of a backward pass (everything that trains ran in Python, "
    "or the compiler's backend makes none), and there is no trace."
)
_EMPTY = "The compiled graphs contain no operator of a forward pass, so there is nothing to count."


class Alone(Struct, frozen=True):
    """The answer from the graphs, without a trace.

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
        judgement = _unknown(unknown) if parts else Judgement("inconclusive", _NOTHING)
        return Alone(judgement, code, surrounded)
    entries = _Entries(parts, [reruns(graphs.around.get(one.compile_id, ())) for one in parts])
    if not entries.counts.counted.any():
        return Alone(Judgement("inconclusive", _EMPTY), code, surrounded)
    blocks = with_lookalikes(_blocks(parts, entries, graphs), entries.counts, entries.kinds)
    judgement = weigh(entries.counts, blocks, entries.counts.operators or ())
    judgement = with_own(judgement, entries.counts, entries.own)
    return Alone(judgement, code, surrounded)


def answer_without_backward(facts: RecomputeFacts, graphs: Graphs) -> Answered | None:
    """The answer where compiled autograd has made one graph of the whole backward pass.

    Such a graph has no separate autograd nodes. ``None`` for any other trace.
    """
    if not graphs.whole_backward or bool(facts.counts.counted.any()):
        return None
    alone = answer_alone(graphs)
    answered = replace(facts, judgement=alone.judgement, level="graphs", compiled=None)
    return Answered(answered, answered, alone.code, seen=False, priced=False)


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
            m=runs.astype(np.float64),
            runs=runs,
            weight=np.array([cost for part in parts for cost in part.costs], np.float64),
            designed=np.zeros(whole, np.int64),
            recompute_ns=zero,
            redundant_ns=zero,
            counted=np.array([one for part in parts for one in part.repeats.trains], np.bool_),
            step=np.zeros(whole, np.int64),
            batch=np.zeros(whole, np.int64),
            flight=np.zeros(whole, np.int64),
            redundant_rows=np.zeros(0, np.int64),
        )


def _blocks(parts: Sequence[Partition], entries: _Entries, graphs: Graphs) -> list[Block]:
    """The blocks under checkpoints inside graphs and around whole graphs."""
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
