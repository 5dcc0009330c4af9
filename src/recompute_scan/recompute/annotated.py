"""The run wrapper's annotations in a trace, and whether they agree with the operators."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
from msgspec import Struct

from recompute_scan.annotations import (
    ANY_RECOMPUTE,
    REGION,
    SELECTIVE,
    RegionAnnotation,
    parse_recompute,
    parse_region,
)
from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.alignment import Alignment
from recompute_scan.recompute.roles import Role, Structure
from recompute_scan.trace.calls import Calls
from recompute_scan.trace.columns import Bool, Int32, Int64

# So many operators are named that differ between a recompute and its forward pass.
_MOST_NAMED = 3


class AnnotatedCall(Struct, frozen=True):
    """One checkpointed call of the forward pass.

    Attributes:
        annotation: What the wrapper wrote.
        row: Row of the annotation.
        first: Position of its first operator in ``Alignment.forward``.
        last: Position of its last operator.
        recomputes: How many recomputes of this call were marked.
    """

    annotation: RegionAnnotation
    row: int
    first: int
    last: int
    recomputes: int


class Annotations(Struct, frozen=True):
    """All annotations of a trace.

    Attributes:
        calls: Checkpointed calls of the forward pass that hold an operator, outermost first.
        forward: The rows that their positions count: ``Alignment.forward``.
        disagreeing: Recomputed operators outside every annotated recompute, and operators inside
            one that the forward pass does not explain. 0 when both views agree.
        recomputed: Recomputed operators found by structure and alignment, for comparison.
        mechanisms: Those of all checkpointed calls, of calls in another's recompute too.
        in_hooks: How many checkpointed calls ran in a backward pass and in no recompute, as
            gradient hooks run them.
    """

    calls: tuple[AnnotatedCall, ...]
    forward: Int64
    disagreeing: int
    recomputed: int
    mechanisms: frozenset[str] = frozenset()
    in_hooks: int = 0


def read_annotations(
    calls: Calls, structure: Structure, alignment: Alignment
) -> Annotations | None:
    """The annotations of the trace, or ``None`` where the run wrapper left none."""
    regions = calls.named(re.compile(re.escape(REGION)))
    recomputes = calls.named(ANY_RECOMPUTE)
    if not len(regions):
        return None
    times: dict[int, int] = {}
    for row in recomputes:
        call = parse_recompute(calls.names[calls.name[row]])
        if call is not None:
            times[call] = times.get(call, 0) + 1
    marked = []
    for row in regions[structure.engine[regions] < 0]:
        annotation = parse_region(calls.names[calls.name[row]])
        first = int(alignment.forward.searchsorted(row))
        last = int(alignment.forward.searchsorted(row + calls.size[row], side="right")) - 1
        if annotation is not None and last >= first:
            marked.append(
                AnnotatedCall(annotation, int(row), first, last, times.get(annotation.call, 0))
            )
    matched, original = alignment.again, alignment.original
    inside = calls.inside(recomputes)
    # A function's annotation is around what it was given to run, and not around what it does
    # itself.
    beside = structure.function[original] > _innermost(calls, regions)[original]
    unexplained = alignment.unexplained[inside[alignment.unexplained]]
    unexplained = unexplained[structure.role[unexplained] == Role.RECOMPUTE]
    unexplained = unexplained[~_prepares(structure, unexplained, np.sort(matched))]
    return Annotations(
        calls=tuple(marked),
        forward=alignment.forward,
        disagreeing=int((~inside[matched] & ~beside & ~alignment.by_design).sum())
        + len(unexplained),
        recomputed=len(matched),
        mechanisms=frozenset(
            annotation.mechanism
            for row in regions
            if (annotation := parse_region(calls.names[calls.name[row]])) is not None
        ),
        in_hooks=int(np.count_nonzero((structure.engine[regions] >= 0) & ~inside[regions])),
    )


def recomputed_calls(
    calls: Calls, annotations: Annotations | None, rows: Int64
) -> list[RegionAnnotation | None]:
    """For each row: the checkpointed call in whose recompute it stands; ``None`` if unknown."""
    known = annotations.calls if annotations is not None else ()
    by_number = {call.annotation.call: call.annotation for call in known}
    found = []
    for row in rows:
        above = int(calls.parent[row])
        number = None
        while above >= 0 and number is None:
            number = parse_recompute(calls.names[calls.name[above]])
            above = int(calls.parent[above])
        found.append(by_number.get(number or 0))
    return found


def unmarked_functions(calls: Calls, structure: Structure, annotations: Annotations) -> list[int]:
    """Rows of the calls of checkpoint functions in the forward pass that bear no annotation of
    their own.

    A function's annotation stands directly in its call.
    """
    own = (structure.function == np.arange(len(calls))) & (structure.engine < 0)
    own &= np.array([name != vocabulary.TORCHS_FUNCTION for name in calls.names])[calls.name]
    marked = {
        int(calls.parent[c.row]) for c in annotations.calls if c.annotation.variant == "reentrant"
    }
    return [row for row in np.flatnonzero(own).tolist() if row not in marked]


class MarkedCounts(Struct, frozen=True):
    """How often the annotations alone say that work ran again.

    Attributes:
        runs: One entry per forward operator: how often its checkpointed call was recomputed.
        passes: Through how many backward passes that call went, at least 1.
        differing: Names of the operators of recomputes that the forward pass has not.
    """

    runs: Int64
    passes: Int64
    differing: tuple[str, ...]


def count_by_marks(
    calls: Calls, structure: Structure, alignment: Alignment, annotations: Annotations
) -> MarkedCounts | None:
    """What the annotations count; ``None`` where they cannot tell.

    One annotation is one recompute of all that its call holds, unless another checkpoint is around
    the call or within it, the call keeps some results, or a function without annotations runs work
    again.
    """
    regions = calls.named(re.compile(re.escape(REGION)))
    alone = all(call.annotation.depth == 0 for call in annotations.calls)
    kept = any(SELECTIVE in call.annotation.options.split(",") for call in annotations.calls)
    if not alone or kept or (structure.engine[regions] >= 0).any():
        return None
    if unmarked_functions(calls, structure, annotations):
        return None
    runs = np.zeros(len(alignment.forward), np.int64)
    passes = alignment.passes.copy()
    for call in annotations.calls:
        places = slice(call.first, call.last + 1)
        runs[places], passes[places] = call.recomputes, passes[places].max()
    inside = calls.inside(calls.named(ANY_RECOMPUTE))
    rows = alignment.unexplained
    rows = rows[inside[rows] & (structure.role[rows] == Role.RECOMPUTE)]
    names = Counter(calls.names[code] for code in calls.name[rows].tolist())
    forward = [
        name for name in names if vocabulary.forward_only(name) or vocabulary.light_forward(name)
    ]
    return MarkedCounts(runs, passes, tuple(forward or names)[:_MOST_NAMED])


def _prepares(structure: Structure, rows: Int64, matched: Int64) -> Bool:
    """For each row: is it before a checkpoint function, no recomputed operator between?

    Within a reentrant checkpoint, whose first run has gradients off, some functions are called
    in the recompute alone, and so is what makes their arguments (fairscale).
    """
    functions = np.flatnonzero(structure.function == np.arange(len(structure.function)))
    end = len(structure.function)
    function, recomputed = (
        np.append(after, end)[after.searchsorted(rows)] for after in (functions, matched)
    )
    same = structure.engine[np.minimum(function, end - 1)] == structure.engine[rows]
    return np.asarray((function < recomputed) & same)


def _innermost(calls: Calls, rows: Int64) -> Int32:
    """For each call: the innermost of ``rows`` that holds it, -1 for none."""
    found = np.full(len(calls), -1, np.int32)
    for row in rows.tolist():  # in order: what is in another comes after it
        found[row + 1 : row + 1 + int(calls.size[row])] = row
    return found
