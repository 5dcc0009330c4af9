"""Where checkpoints begin and end in the forward pass, by annotations or by recomputes.

Checkpoints that share a boundary are distinguished by the calls that their recomputes hold.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import cast, get_args

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.annotations import (
    ANY_RECOMPUTE,
    IN_PARTS,
    REGION,
    SELECTIVE,
    RegionAnnotation,
    parse_recompute,
    parse_region,
)
from recompute_scan.frameworks import pytorch
from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.alignment import Alignment
from recompute_scan.recompute.by_design import find_own_work, functions_around
from recompute_scan.recompute.roles import Role, Structure
from recompute_scan.recompute.sequences import Recompute
from recompute_scan.result import Checkpoint, Variant
from recompute_scan.trace.calls import Calls
from recompute_scan.trace.columns import Bool, Int32, Int64

# So many operators are named that differ between a recompute and its forward pass.
_MOST_NAMED = 3


class AnnotatedCall(Struct, frozen=True):
    """One checkpointed call of work of the forward pass.

    Attributes:
        row: Row of the annotation.
        first: Position of its first operator in ``Alignment.forward``.
        last: Position of its last operator.
        recomputes: How many recomputes of this call were annotated.
    """

    annotation: RegionAnnotation
    row: int
    first: int
    last: int
    recomputes: int


class Annotations(Struct, frozen=True):
    """All annotations of a trace.

    Attributes:
        calls: Checkpointed calls that hold an operator of the forward pass, outermost first; those
            that only a recompute has come last.
        disagreeing: Recomputed operators outside every annotated recompute, and operators inside
            one that the forward pass does not explain. 0 when both views agree.
        recomputed: Recomputed operators found by structure and alignment, for comparison.
        mechanisms: Those of all checkpointed calls, of calls in another's recompute too.
        in_hooks: How many checkpointed calls ran in a backward pass and in no recompute, as
            gradient hooks run them.
    """

    calls: tuple[AnnotatedCall, ...]
    disagreeing: int
    recomputed: int
    mechanisms: frozenset[str] = frozenset()
    in_hooks: int = 0


def read_annotations(alignment: Alignment) -> Annotations | None:
    """The annotations of the trace, or ``None`` where the run wrapper left none."""
    calls, structure = alignment.structure.calls, alignment.structure
    regions = calls.named(re.compile(re.escape(REGION)))
    recomputes = calls.named(ANY_RECOMPUTE)
    if not len(regions):
        return None
    times = Counter(parse_recompute(calls.called(row)) for row in recomputes)
    known = {row: parse_region(calls.called(row)) for row in regions.tolist()}
    # The script's own functions without an annotated recompute.
    silent = [row for row, one in known.items() if one and one.function and not times[one.call]]
    matched, original = alignment.again, alignment.original
    inside, around = calls.inside(recomputes), innermost(calls, regions)[original]
    # A hook, say, ran the block of a function again, and not the function's node.
    elsewhere = ~inside[matched] & np.isin(around, silent)
    regions = regions[~np.isin(regions, around[elsewhere])]
    if not len(regions):
        return None
    annotated = []
    for row in regions[structure.engine[regions] < 0].tolist():
        annotation = known[row]
        first = int(alignment.forward.searchsorted(row))
        last = int(alignment.forward.searchsorted(row + calls.size[row], side="right")) - 1
        if annotation is not None and last >= first:
            annotated.append(AnnotatedCall(annotation, row, first, last, times[annotation.call]))
    again = {row: known[row] for row in regions[inside[regions]].tolist()}
    later = {row: one for row, one in again.items() if one and times[one.call]}
    annotated += _switched_on_later(alignment, later, times, annotated) if later else ()
    # A function's annotation is around what it was given to run, and not around what it does
    # itself.
    beside = structure.function[original] > around
    # Before its recompute the node unpacks its own tensors, which autograd does not record.
    node = structure.engine[matched]
    beside |= (structure.number[matched] < 0) & np.isin(node, structure.engine[recomputes])
    unexplained = alignment.unexplained[inside[alignment.unexplained]]
    unexplained = unexplained[structure.role[unexplained] == Role.RECOMPUTE]
    unexplained = unexplained[~_prepares(structure, unexplained, np.sort(matched))]
    return Annotations(
        calls=tuple(annotated),
        disagreeing=int((~inside[matched] & ~beside & ~elsewhere & ~alignment.by_design).sum())
        + len(unexplained),
        recomputed=len(matched),
        mechanisms=frozenset(one.mechanism for row in regions.tolist() if (one := known[row])),
        in_hooks=int(np.count_nonzero((structure.engine[regions] >= 0) & ~inside[regions])),
    )


def _switched_on_later(
    alignment: Alignment,
    regions: dict[int, RegionAnnotation],
    times: Counter[int | None],
    annotated: Sequence[AnnotatedCall],
) -> list[AnnotatedCall]:
    """The checkpoints that a recompute had around work which its forward pass ran without them.

    A layer that checkpoints itself only where gradients are recorded does so in the recompute of a
    reentrant checkpoint: its first run records none.
    """
    calls = alignment.structure.calls
    there: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for each in annotated:
        there[each.annotation.site, each.annotation.module].append((each.first, each.last))
    order = alignment.again.argsort(kind="stable")
    again, found = alignment.again[order], []
    for row, one in regions.items():
        begin, end = again.searchsorted((row, row + int(calls.size[row]) + 1)).tolist()
        places, same = alignment.places[order[begin:end]], there[one.site, one.module]
        if not len(places):
            continue
        bounds = int(places.min()), int(places.max())
        if not any(same_boundary(bounds, other) for other in same):
            same.append(bounds)
            found.append(AnnotatedCall(one, row, *bounds, times[one.call]))
    return found


def recomputed_calls(
    calls: Calls, annotations: Annotations | None, rows: Int64
) -> list[RegionAnnotation | None]:
    """For each row: the checkpointed call that its recompute repeats; ``None`` if unknown."""
    known = annotations.calls if annotations is not None else ()
    by_number = {call.annotation.call: call.annotation for call in known}
    found = []
    for row in rows:
        numbers = filter(None, (parse_recompute(calls.called(above)) for above in calls.above(row)))
        found.append(by_number.get(next(numbers, 0)))
    return found


def unannotated_functions(structure: Structure, annotations: Annotations) -> list[int]:
    """Rows of the calls of checkpoint functions in the forward pass that bear no annotation.

    A function's annotation stands directly in its call.
    """
    calls = structure.calls
    own = (structure.function == np.arange(len(calls))) & (structure.engine < 0)
    own &= ~calls.where(vocabulary.TORCHS_FUNCTION.__eq__)
    known = (c.row for c in annotations.calls if c.annotation.variant == "reentrant")
    annotated = {*calls.parent[[*known]].tolist()}
    return [row for row in np.flatnonzero(own).tolist() if row not in annotated]


class AnnotatedCounts(Struct, frozen=True):
    """How often the annotations alone say that work ran again.

    Attributes:
        runs: One entry per forward operator: how often its checkpointed call was recomputed.
        passes: Through how many backward passes that call went, at least 1.
        differing: Names of the operators of recomputes that the forward pass has not.
    """

    runs: Int64
    passes: Int64
    differing: tuple[str, ...]


def count_by_annotations(alignment: Alignment, annotations: Annotations) -> AnnotatedCounts | None:
    """The counts of the annotations; ``None`` where they do not show them.

    One annotation is one recompute of all that its call holds, unless another checkpoint is around
    the call or within it, the call keeps some results, or a function without annotations runs work
    again.
    """
    calls, structure = alignment.structure.calls, alignment.structure
    regions = calls.named(re.compile(re.escape(REGION)))
    alone = all(call.annotation.depth == 0 for call in annotations.calls)
    kept = any(SELECTIVE in call.annotation.options.split(",") for call in annotations.calls)
    if not alone or kept or (structure.engine[regions] >= 0).any():
        return None
    if unannotated_functions(structure, annotations):
        return None
    inside = calls.inside(calls.named(ANY_RECOMPUTE))
    if any(not (each.by_design or inside[each.again].any()) for each in alignment.recomputes):
        return None
    runs = np.zeros(len(alignment.forward), np.int64)
    passes = alignment.passes.copy()
    for call in annotations.calls:
        places = slice(call.first, call.last + 1)
        runs[places], passes[places] = call.recomputes, passes[places].max()
    rows = alignment.unexplained
    rows = rows[inside[rows] & (structure.role[rows] == Role.RECOMPUTE)]
    names = Counter(calls.names[code] for code in calls.name[rows].tolist())
    forward = [
        name for name in names if vocabulary.forward_only(name) or vocabulary.light_forward(name)
    ]
    return AnnotatedCounts(runs, passes, tuple(forward or names)[:_MOST_NAMED])


def _prepares(structure: Structure, rows: Int64, matched: Int64) -> Bool:
    """For each row: is it before a checkpoint function, no recomputed operator between?

    A reentrant checkpoint's first run has gradients off. Within it some functions are called
    in the recompute alone, and so is what makes their arguments (fairscale).
    """
    functions = np.flatnonzero(structure.function == np.arange(len(structure.function)))
    end = len(structure.function)
    function, recomputed = (
        np.append(after, end)[after.searchsorted(rows)] for after in (functions, matched)
    )
    same = structure.engine[np.minimum(function, end - 1)] == structure.engine[rows]
    return np.asarray((function < recomputed) & same)


def innermost(calls: Calls, rows: Int64) -> Int32:
    """For each call: the innermost of ``rows`` that holds it, -1 for none."""
    found = np.full(len(calls), -1, np.int32)
    for row in rows.tolist():  # in order: what is in another comes after it
        found[row + 1 : row + 1 + int(calls.size[row])] = row
    return found


# Two sequences that share this much of their union have the same boundary: early stop leaves
# out the last operators of one, and not of the other.
SAME_BOUNDARY = 0.75


def same_boundary(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Are two sequences, as (first, last), the same but for what early stop leaves out?"""
    (first, last), (begin, end) = one, other
    if last < begin or end < first:
        return False  # most are
    shared = min(last, end) - max(first, begin) + 1
    union = max(last, end) - min(first, begin) + 1
    return shared >= SAME_BOUNDARY * union


def of_function(checkpoint: Checkpoint, name: str, in_parts: frozenset[str]) -> Checkpoint:
    """The checkpoint, as one by an autograd function of this name."""
    if name in in_parts:
        checkpoint = replace(checkpoint, options=(*checkpoint.options, IN_PARTS))
    mechanism = vocabulary.CHECKPOINT_FUNCTIONS.get(name)
    if mechanism is not None:
        return replace(checkpoint, mechanism=mechanism)
    return replace(checkpoint, mechanism=pytorch.OWN.name, function=name)


def of_one_backward(recomputes: list[Recompute], alignment: Alignment) -> list[Recompute]:
    """Of the recomputes of one boundary, in order of time, those for one backward pass.

    Several may go through one forward pass, one after the other, each with the same recomputes.
    """
    recomputes = sorted(recomputes, key=lambda recompute: int(recompute.again[0]))
    first = recomputes[0].original
    passes = int(np.median(alignment.passes[alignment.forward.searchsorted(first)]))
    if passes < 2 or len(recomputes) % passes:
        return recomputes
    return recomputes[: len(recomputes) // passes]


def told_apart(
    recomputes: list[Recompute], around: FunctionsAround, in_parts: frozenset[str]
) -> list[Checkpoint]:
    """The checkpoints of one boundary, outermost first, with their functions' names."""
    names = around.first_runs(recomputes[0].original)
    inside = Counter(around.recomputed(recompute.again) for recompute in recomputes)
    variants = _variants(len(names), inside)
    checkpoints = [Checkpoint(depth, variant) for depth, variant in enumerate(variants)]
    reentrant = [one.depth for one in checkpoints if one.variant == "reentrant"]
    if None in variants:
        # It is not known which function made which, only that there is one.
        reentrant, names = [-1], around.names(recomputes)[:1]
    for depth, name in zip(reentrant, names, strict=False):
        if name != vocabulary.TORCHS_FUNCTION:
            checkpoints[depth] = of_function(checkpoints[depth], name, in_parts)
    return checkpoints


def _variants(count: int, inside: Counter[int]) -> list[Variant | None]:
    """Variants of the checkpoints of one boundary, outermost first; ``None`` where unknown.

    A reentrant one calls its function wherever what it checkpoints runs, but in its own recompute.
    So the forward pass holds as many calls around these operators (``count``) as there are
    reentrant ones, and a recompute as many (``inside``, with their number) as there are further
    inside than the checkpoint that asked for it. Of recomputes with equally many, one is a
    reentrant checkpoint's, if there are more calls in the forward pass; the others are of
    non-reentrant ones right inside it.
    """
    if any(not inside[number] for number in range(count)) or max(inside) > count:
        return [None] * inside.total()
    found: list[Variant | None] = []
    for number in range(count, -1, -1):
        own = number < count
        if own:
            found.append("reentrant")
        found.extend("non-reentrant" for _ in range(inside[number] - own))
    return found


class FunctionsAround:
    """The calls of checkpoint functions around some operators and little else."""

    def __init__(self, structure: Structure, recomputes: Sequence[Recompute]) -> None:
        self._calls, self._structure = structure.calls, structure
        self._forward = np.unique(np.concatenate([each.original for each in recomputes]))
        self._again = np.sort(np.concatenate([each.again for each in recomputes]))

    def first_runs(self, rows: Int64) -> list[str]:
        """Names of those around these operators of the forward pass, in order; outermost first."""
        around = list(self._around(rows, self._forward))
        return [self._calls.called(call) for call in reversed(around)]

    def recomputed(self, rows: Int64) -> int:
        """How many are around these of a recompute, in order."""
        return sum(1 for _ in self._around(rows, self._again))

    def names(self, recomputes: list[Recompute]) -> list[str]:
        """Names of the functions that hold some first run, except torch's."""
        originals = np.concatenate([each.original for each in recomputes])
        rows = sorted({*self._structure.function[originals].tolist()} - {-1})
        names = (self._calls.called(row) for row in rows)
        return [name for name in names if name != vocabulary.TORCHS_FUNCTION]

    def _around(self, rows: Int64, every: Int64) -> Iterator[int]:
        """Rows of the calls, innermost first."""
        first, last = every.searchsorted(rows[[0, -1]]).tolist()
        for call in functions_around(self._structure, int(rows[len(rows) // 2])):
            stop = call + int(self._calls.size[call]) + 1
            begin, end = every.searchsorted((call, stop)).tolist()
            if same_boundary((first, last), (begin, end - 1)):
                yield call


class Span(Struct, frozen=True):
    """A sequence of the forward pass that one or more checkpoints enclose.

    ``first`` and ``last`` are positions in ``Alignment.forward``; ``checkpoints`` are those
    with this boundary, outermost first.
    """

    first: int
    last: int
    checkpoints: tuple[Checkpoint, ...]
    module: str | None = None
    module_class: str | None = None


class Node(Struct, frozen=True):
    """A span with the spans inside it, in forward order."""

    span: Span
    children: list[Node]


def spans_from_annotations(alignment: Alignment, annotations: Annotations) -> list[Span]:
    """One span per annotated boundary, and per call of a function without one, in forward order."""
    calls, structure = alignment.structure.calls, alignment.structure
    in_parts = structure.functions.in_parts
    spans = [(call.row, _annotated(call, in_parts)) for call in annotations.calls]
    for row in unannotated_functions(structure, annotations):
        bounds = row, row + int(calls.size[row]) + 1
        first, last = alignment.forward.searchsorted(bounds).tolist()
        if last > first:
            name = calls.called(row)
            own = of_function(Checkpoint(0, "reentrant"), name, in_parts)
            spans.append((row, Span(first, last - 1, (own,))))
    return merge([span for _, span in sorted(spans, key=lambda item: item[0])])


def _annotated(call: AnnotatedCall, in_parts: frozenset[str]) -> Span:
    one = call.annotation
    options = [*filter(None, one.options.split(",")), *[IN_PARTS] * (one.function in in_parts)]
    checkpoint = Checkpoint(
        depth=one.depth,
        variant=cast("Variant", one.variant) if one.variant in get_args(Variant) else None,
        mechanism=one.mechanism or None,
        call_site=one.site or None,
        options=tuple(options),
        function=one.function or None,
    )
    names = one.module or None, one.module_class or None
    return Span(call.first, call.last, (checkpoint,), *names)


def spans_from_recomputes(alignment: Alignment) -> list[Span]:
    """One span per recomputed boundary, in forward order, with the checkpoints that ranges show."""
    if not alignment.recomputes:
        return []
    recomputes = _of_blocks(alignment)
    structure = alignment.structure
    around = FunctionsAround(structure, recomputes)
    intervals = []
    for recompute in recomputes:
        places = alignment.forward.searchsorted(recompute.original)
        intervals.append((int(places.min()), int(places.max()), recompute))
    intervals.sort(key=lambda item: (item[0], -item[1]))
    groups: list[list[tuple[int, int, Recompute]]] = []
    for interval in intervals:
        recent = reversed(groups[-8:])
        same = (group for group in recent if same_boundary(group[0][:2], interval[:2]))
        if (group := next(same, None)) is not None:
            group.append(interval)
        else:
            groups.append([interval])
    spans = []
    for group in groups:
        firsts, lasts, mine = zip(*group, strict=True)
        one = of_one_backward(list(mine), alignment)
        checkpoints = tuple(told_apart(one, around, structure.functions.in_parts))
        spans.append(Span(min(firsts), max(lasts), checkpoints))
    return spans


def forest(spans: Sequence[Span]) -> list[Node]:
    """The spans nested by containment, in forward order."""
    roots: list[Node] = []
    around: list[Node] = []
    for span in sorted(spans, key=lambda span: (span.first, -span.last)):
        while around and span.last > around[-1].span.last:
            around.pop()
        node = Node(span, [])
        (around[-1].children if around else roots).append(node)
        around.append(node)
    return roots


def merge(spans: list[Span]) -> list[Span]:
    """Join spans of one boundary: the outer one's interval, all their checkpoints."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.first, -span.last)):
        outer = merged[-1] if merged else None
        if outer is not None and same_boundary((outer.first, outer.last), (span.first, span.last)):
            merged[-1] = replace(
                outer,
                checkpoints=outer.checkpoints + span.checkpoints,
                module=span.module or outer.module,
                module_class=span.module_class or outer.module_class,
            )
        else:
            merged.append(span)
    return merged


def _of_blocks(alignment: Alignment) -> list[Recompute]:
    """The recomputes without the own work of the functions inside them."""
    own = find_own_work(alignment).rows
    found = []
    for one in alignment.recomputes:
        block = ~np.isin(one.original, own)
        block |= not block.any()
        original, again, ran = one.original[block], one.again[block], one.ran[block]
        found.append(replace(one, original=original, again=again, ran=ran))
    return found
