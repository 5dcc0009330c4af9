"""Checkpointed sequences of the forward pass, from annotations or from recomputes, as a forest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.annotations import IN_PARTS
from recompute_scan.model import Calls
from recompute_scan.recompute.align import Alignment
from recompute_scan.recompute.annotated import (
    AnnotatedCall,
    Annotations,
    unmarked_functions,
)
from recompute_scan.recompute.boundary import (
    FunctionsAround,
    asked_once,
    of_function,
    of_one_backward,
    same_boundary,
    told_apart,
)
from recompute_scan.recompute.matching import Recompute
from recompute_scan.recompute.own_work import find_own_work
from recompute_scan.recompute.roles import Structure
from recompute_scan.result import Checkpoint, Variant


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
