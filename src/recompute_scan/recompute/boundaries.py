"""Where a checkpoint begins and ends, and which checkpoints share a boundary.

The checkpoints of one boundary, told apart by what their recomputes hold.

Checkpointed sequences of the forward pass, from annotations or from recomputes, as a forest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.annotations import IN_PARTS
from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.alignment import Alignment, find_own_work
from recompute_scan.recompute.annotated import AnnotatedCall, Annotations, unmarked_functions
from recompute_scan.recompute.roles import Structure
from recompute_scan.recompute.sequences import Recompute
from recompute_scan.result import Checkpoint, Variant
from recompute_scan.trace.calls import Calls
from recompute_scan.trace.columns import Int64

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
    """The checkpoint as that of an autograd function of this name."""
    if name in in_parts:
        checkpoint = replace(checkpoint, options=(*checkpoint.options, IN_PARTS))
    mechanism = vocabulary.CHECKPOINT_FUNCTIONS.get(name)
    if mechanism is not None:
        return replace(checkpoint, mechanism=mechanism)
    return replace(checkpoint, mechanism=vocabulary.OWN_FUNCTION, function=name)


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


def asked_once(recomputes: list[Recompute], calls: Calls, structure: Structure) -> list[Recompute]:
    """Those without what a node asks for again as a function's node evaluates it once more."""
    evaluated: dict[tuple[int, int], int] = {}
    found = []
    for recompute in recomputes:
        engine = recompute.engine
        above = int(calls.parent[engine])
        around = int(structure.engine[above]) if above >= 0 else -1
        number = int(structure.number[engine])
        first = evaluated.setdefault((around, number), engine)
        if around < 0 or number < 0 or first == engine:
            found.append(recompute)
    return found


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
        # Which is whose is not known; that there is one is.
        reentrant, names = [-1], around.names(recomputes)[:1]
    for depth, name in zip(reentrant, names, strict=False):
        if name != vocabulary.TORCHS_FUNCTION:
            checkpoints[depth] = of_function(checkpoints[depth], name, in_parts)
    return checkpoints


def _variants(count: int, inside: Counter[int]) -> list[Variant | None]:
    """Variants of the checkpoints of one boundary, outermost first; ``None`` where unknown.

    A reentrant one calls its function wherever what it checkpoints runs, but in its own recompute.
    So the forward pass holds as many calls around these operators as there are reentrant ones, and
    a recompute as many as there are further inside than the checkpoint that asked for it. Of
    recomputes with equally many, one is that of a reentrant checkpoint, if there are more calls in
    the forward pass; the others are of non-reentrant ones right inside it.

    Args:
        count: How many calls the forward pass holds around these operators.
        inside: How many recomputes hold so many of them.
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

    def __init__(self, calls: Calls, structure: Structure, recomputes: Sequence[Recompute]) -> None:
        self._calls = calls
        self._function = structure.function
        self._forward = np.unique(np.concatenate([each.original for each in recomputes]))
        self._again = np.sort(np.concatenate([each.again for each in recomputes]))

    def first_runs(self, rows: Int64) -> list[str]:
        """Names of those around these operators of the forward pass, in order; outermost first."""
        around = list(self._around(rows, self._forward))
        return [self._calls.names[self._calls.name[call]] for call in reversed(around)]

    def recomputed(self, rows: Int64) -> int:
        """How many are around these of a recompute, in order."""
        return sum(1 for _ in self._around(rows, self._again))

    def names(self, recomputes: list[Recompute]) -> list[str]:
        """Names of those that hold some first run, where they are not that of torch's own."""
        functions = np.concatenate([self._function[each.original] for each in recomputes])
        rows = sorted({*functions.tolist()} - {-1})
        names = (self._calls.names[self._calls.name[row]] for row in rows)
        return [name for name in names if name != vocabulary.TORCHS_FUNCTION]

    def _around(self, rows: Int64, every: Int64) -> Iterator[int]:
        """Rows of the calls, innermost first."""
        first, last = every.searchsorted(rows[[0, -1]]).tolist()
        call = int(self._function[rows[len(rows) // 2]])
        while call >= 0:
            stop = call + int(self._calls.size[call]) + 1
            begin, end = every.searchsorted((call, stop)).tolist()
            if same_boundary((first, last), (begin, end - 1)):
                yield call
            above = int(self._calls.parent[call])
            call = int(self._function[above]) if above >= 0 else -1


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

    @property
    def length(self) -> int:
        """Number of forward operators."""
        return self.last - self.first + 1


class Node(Struct, frozen=True):
    """A span with the spans inside it."""

    span: Span
    children: tuple[Node, ...]


def spans_from_annotations(
    calls: Calls, structure: Structure, annotations: Annotations
) -> list[Span]:
    """One span per annotated boundary, and per call of a function without one, in forward order."""
    in_parts = structure.functions.in_parts
    spans = [(call.row, _marked(call, in_parts)) for call in annotations.calls]
    for row in unmarked_functions(calls, structure, annotations):
        first, last = np.searchsorted(
            annotations.forward, (row, row + int(calls.size[row]) + 1)
        ).tolist()
        if last > first:
            name = calls.names[calls.name[row]]
            own = of_function(Checkpoint(0, "reentrant"), name, in_parts)
            spans.append((row, Span(first, last - 1, (own,))))
    return merge([span for _, span in sorted(spans, key=lambda item: item[0])])


def _marked(call: AnnotatedCall, in_parts: frozenset[str]) -> Span:
    options = [one for one in call.annotation.options.split(",") if one]
    if call.annotation.function in in_parts:
        options.append(IN_PARTS)
    checkpoint = Checkpoint(
        depth=call.annotation.depth,
        variant=_variant(call.annotation.variant),
        mechanism=call.annotation.mechanism or None,
        call_site=call.annotation.site or None,
        options=tuple(options),
        function=call.annotation.function or None,
    )
    return Span(
        first=call.first,
        last=call.last,
        checkpoints=(checkpoint,),
        module=call.annotation.module or None,
        module_class=call.annotation.module_class or None,
    )


def spans_from_recomputes(calls: Calls, structure: Structure, alignment: Alignment) -> list[Span]:
    """One span per recomputed boundary, in forward order, with what the ranges tell of it."""
    if not alignment.recomputes:
        return []
    recomputes = _of_blocks(calls, structure, alignment)
    around = FunctionsAround(calls, structure, recomputes)
    intervals = []
    for recompute in recomputes:
        places = alignment.forward.searchsorted(recompute.original)
        intervals.append((int(places.min()), int(places.max()), recompute))
    intervals.sort(key=lambda item: (item[0], -item[1]))
    groups: list[list[tuple[int, int, Recompute]]] = []
    for interval in intervals:
        for group in reversed(groups[-8:]):
            if same_boundary(group[0][:2], interval[:2]):
                group.append(interval)
                break
        else:
            groups.append([interval])
    spans = []
    for group in groups:
        recomputes = of_one_backward([recompute for _, _, recompute in group], alignment)
        recomputes = asked_once(recomputes, calls, structure)
        spans.append(
            Span(
                first=min(first for first, _, _ in group),
                last=max(last for _, last, _ in group),
                checkpoints=tuple(told_apart(recomputes, around, structure.functions.in_parts)),
            )
        )
    return spans


def forest(spans: Sequence[Span]) -> list[Node]:
    """The spans nested by containment, in forward order."""
    roots: list[Node] = []
    stack: list[tuple[Span, list[Node]]] = []

    def close() -> None:
        span, children = stack.pop()
        (stack[-1][1] if stack else roots).append(Node(span, tuple(children)))

    for span in sorted(spans, key=lambda span: (span.first, -span.last)):
        while stack and span.last > stack[-1][0].last:
            close()
        stack.append((span, []))
    while stack:
        close()
    return sorted(roots, key=lambda node: node.span.first)


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


def _variant(text: str) -> Variant | None:
    if text == "reentrant":
        return "reentrant"
    if text == "non-reentrant":
        return "non-reentrant"
    return None


def _of_blocks(calls: Calls, structure: Structure, alignment: Alignment) -> list[Recompute]:
    """The recomputes without what the functions inside them work out beside their blocks."""
    own = find_own_work(calls, structure, alignment).rows
    if not len(own):
        return list(alignment.recomputes)
    found = []
    for recompute in alignment.recomputes:
        block = ~np.isin(recompute.original, own)
        found.append(
            replace(
                recompute,
                original=recompute.original[block],
                again=recompute.again[block],
                ran=recompute.ran[block],
            )
            if block.any()
            else recompute
        )
    return found
