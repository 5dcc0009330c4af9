"""Multiplicity of every forward operator, with what its recomputes took."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from recompute_scan.numpy_tools import changes, medians_of, split, turns_of
from recompute_scan.recompute.alignment import Alignment
from recompute_scan.recompute.roles import OperatorCodes, Role, Structure, Work
from recompute_scan.recompute.sequences import alike
from recompute_scan.trace.calls import Calls, StepSpan, step_of
from recompute_scan.trace.columns import Bool, Int64

Float64 = npt.NDArray[np.float64]

# A multiplicity matters when at least this share of forward time, or of a block's, has it.
MATTERS = 0.01


class Counts(Struct, frozen=True):
    """One entry per forward operator, in the order of ``Alignment.forward``.

    Attributes:
        rows: Row of the operator in the calls.
        multiplicity: How often checkpoints ran it again per backward pass: m.
        runs: How often checkpoints ran it again, in all.
        by_design: How often functions or the model did, without a checkpoint.
        weight: Time that it typically takes, ns (on the device; see ``Work.time``): the median
            over forward operators of the same name, shapes and types. A single run can be
            slow for unrelated reasons: a page fault, a lazy start, another process.
        again: Time of all its recomputes, ns, gaps between recomputed operators included on a CPU.
        redundant: The part of ``again`` beyond the first recompute per backward pass, ns.
        counted: Whether it has a backward, in a complete step.
        step: Position of its step in the list of steps, -1 outside any.
        batch: Number of its forward pass.
        flight: Number of the forward passes that are held at once, as a pipeline schedule does:
            one more after each backward pass.
        redundant_rows: Rows of the recomputed operators beyond the first per backward pass.
        operators: Names of the operators, where they differ from the calls': several entries
            can be of one call, which compiled code makes of several operators.
    """

    rows: Int64
    multiplicity: Float64
    runs: Int64
    weight: Float64
    again: Float64
    redundant: Float64
    counted: Bool
    step: Int64
    batch: Int64
    flight: Int64
    redundant_rows: Int64
    operators: tuple[str, ...] | None = None
    by_design: Int64 | None = None

    @property
    def designed(self) -> Int64:
        """``by_design``, or none."""
        return np.zeros(len(self.rows), np.int64) if self.by_design is None else self.by_design

    def names(self, calls: Calls, places: slice) -> list[str]:
        """Names of the operators at these places."""
        if self.operators is not None:
            return list(self.operators[places])
        return [calls.names[code] for code in calls.name[self.rows[places]].tolist()]

    def highest(self, among: Bool | Int64 | slice) -> float:
        """The highest m that at least the share ``MATTERS`` of these operators' time has."""
        multiplicity, weight = self.multiplicity[among], self.weight[among]
        enough = MATTERS * weight.sum()
        for value in np.unique(multiplicity)[::-1].tolist():
            if weight[multiplicity >= value].sum() >= enough:
                return float(value)
        return 0.0

    def passes(self, among: slice) -> float:
        """Most backward passes that recomputed one of these operators, at least 1."""
        most = self.multiplicity[among].max(initial=0.0)
        return max(1.0, float(self.runs[among].max(initial=0) / most)) if most else 1.0

    def mean(self, among: Bool | Int64) -> float:
        """Time-weighted mean m of these operators."""
        weight, multiplicity = self.weight[among], self.multiplicity[among]
        if not weight.sum():
            return float(multiplicity.mean()) if len(weight) else 0.0
        return float((multiplicity * weight).sum() / weight.sum())


def count(work: Work, alignment: Alignment, steps: list[StepSpan], complete: Bool) -> Counts:
    """Count the recomputes of each forward operator."""
    calls = alignment.structure.calls
    rows = alignment.forward
    passes = alignment.passes
    places, shares = alignment.places, _shares(work, alignment)
    checkpoints = np.flatnonzero(~alignment.by_design)
    asked = places[checkpoints]
    beyond = checkpoints[turns_of(asked) >= passes[asked]]
    runs, by_design = (
        np.bincount(places[alignment.ran & ~alignment.piece & which], minlength=len(rows))
        for which in (~alignment.by_design, alignment.by_design)
    )
    again, redundant = np.zeros((2, len(rows)))
    np.add.at(again, places, shares)
    np.add.at(redundant, places[beyond], shares[beyond])
    step = step_of(steps, calls.start[rows])
    landed = _backwards_ends(alignment)
    flight = landed.searchsorted(calls.start[rows], side="right")
    begun = np.sort(np.concatenate([landed, _between_micro_batches(alignment, flight)]))
    inside = step >= 0
    inside[inside] = complete[step[inside]]
    return Counts(
        rows=rows,
        multiplicity=runs / passes,
        runs=runs,
        by_design=by_design,
        weight=medians_of(work.time[rows], calls.dims[rows], calls.name[rows])[0],
        again=again,
        redundant=redundant,
        counted=(alignment.backwards > 0) & inside,
        step=step,
        batch=begun.searchsorted(calls.start[rows], side="right"),
        flight=flight,
        redundant_rows=np.sort(alignment.again[beyond]),
    )


def join_steps(structure: Structure, steps: list[StepSpan]) -> list[StepSpan]:
    """The steps, with those joined that several optimizers cut out of one training step.

    Where optimizer steps alone mark the steps, several may belong to one: they follow each
    other without a backward pass between them, or are inside one backward pass, as gradient
    hooks run them.
    """
    calls = structure.calls
    backward = structure.rows(Role.BACKWARD)
    if not len(backward):
        return steps
    backward = backward[calls.start[backward].argsort(kind="stable")]
    begins, ends = calls.start[backward], np.maximum.accumulate(calls.end[backward])
    forward = np.sort(calls.start[(structure.role == Role.FORWARD) & (structure.number >= 0)])
    optimizer = set(calls.end[structure.rows(Role.OPTIMIZER)].tolist())
    joined = steps[:1]
    for step in steps[1:]:
        last = joined[-1]
        at = int(begins.searchsorted(last.end)) - 1
        times = forward if at >= 0 and ends[at] >= last.end else begins
        apart = times.searchsorted(last.end) < times.searchsorted(step.end)
        if last.end not in optimizer:
            joined.append(step)
        elif apart:
            joined.append(StepSpan(last.index + 1, step.start, step.end))
        else:
            joined[-1] = StepSpan(last.index, last.start, step.end)
    return joined


def complete_steps(alignment: Alignment, steps: list[StepSpan], cut_at: int | None = None) -> Bool:
    """For each step: does it hold a forward pass with its backward, and was it read to its end?

    A trace that was cut short ends at ``cut_at``, ns. A step's own range can be in the file before
    all that ran in it.
    """
    step = step_of(
        steps, alignment.structure.calls.start[alignment.forward[alignment.backwards > 0]]
    )
    trained = np.bincount(step[step >= 0], minlength=len(steps)) > 0
    return trained & np.array([cut_at is None or span.end <= cut_at for span in steps], np.bool_)


def _shares(work: Work, alignment: Alignment) -> Float64:
    """Time of each operator of all recomputes; on a CPU the gaps between them are shared out."""
    again, begins = alignment.again, alignment.begins
    time: Float64 = work.time[again].astype(np.float64)
    if work.on_gpu or not len(again):
        return time
    total = np.add.reduceat(time, begins)
    factor = np.ones(len(begins))
    np.divide(host_times(alignment), total, out=factor, where=total > 0)
    time *= np.repeat(np.maximum(factor, 1.0), np.diff(begins, append=len(again)))
    return time


def host_times(alignment: Alignment) -> Int64:
    """Time from the first to the last operator of each recompute on the host, ns, without the
    backward passes between: a function that runs its block in pieces runs backward through each.
    """
    calls, table = alignment.structure.calls, alignment.structure.evaluations
    again, begins = alignment.again, alignment.begins
    if not len(again):
        return begins
    first = np.minimum.reduceat(calls.start[again], begins)
    last = np.maximum.reduceat(calls.end[again], begins)
    nested = np.flatnonzero(table.parent >= 0)
    rows, around = table.row[nested], table.row[table.parent[nested]]
    moments = np.sort(calls.start[rows])

    def key(engine: Int64, moment: Int64) -> Int64:
        found: Int64 = engine * (len(rows) + 1) + moments.searchsorted(moment)
        return found

    keys = key(around, calls.start[rows])
    order = keys.argsort(kind="stable")
    passed = np.concatenate(([0], calls.duration[rows[order]].cumsum()))
    engine = np.array([each.engine for each in alignment.recomputes], np.int64)
    from_, until = keys[order].searchsorted((key(engine, first), key(engine, last)))
    times: Int64 = np.maximum(0, last - first - (passed[until] - passed[from_]))
    return times


def _backwards_ends(alignment: Alignment) -> Int64:
    """When each row of backward passes had ended, and a forward pass began, ns."""
    calls, roots = alignment.structure.calls, alignment.structure.roots
    trained = alignment.forward[alignment.backwards > 0]
    rows = np.concatenate([trained, roots])
    order = calls.start[rows].argsort(kind="stable")
    is_backward = order >= len(trained)
    begins = ~is_backward[1:] & is_backward[:-1]
    # From the end of that pass: what a forward pass does first may have no gradient.
    return np.asarray(calls.end[rows[order]][:-1][begins])


def _between_micro_batches(alignment: Alignment, flight: Int64) -> Int64:
    """When a forward pass had ended and another began with no backward pass between, ns.

    The other runs alike operators, and its own backward pass goes through them.
    """
    calls, forward, through = alignment.structure.calls, alignment.forward, alignment.through
    code = OperatorCodes(calls)[forward]
    trained = np.flatnonzero(through >= 0)
    trained = trained[calls.start[forward[trained]].argsort(kind="stable")]
    begins = np.flatnonzero(changes(flight[trained], through[trained]))
    times = []
    held: dict[int, Int64] = {}
    last = trained[:1]
    pieces = split(trained, begins) if len(trained) else []
    # A pass that goes on after this piece has not ended before it.
    ends = {(int(flight[one[0]]), int(through[one[0]])): at for at, one in enumerate(pieces)}
    for at, piece in enumerate(pieces):
        own, kinds = int(through[piece[0]]), code[piece]
        if flight[piece[0]] != flight[last[-1]]:
            held = {}
        elif (
            own not in held
            and all(ends[int(flight[piece[0]]), one] < at for one in held)
            and any(alike(kinds, other) for other in held.values())
        ):
            times.append(int(calls.end[forward[last[-1]]]))
            held = {}
        held.setdefault(own, kinds)
        last = piece
    return np.array(times, np.int64)
