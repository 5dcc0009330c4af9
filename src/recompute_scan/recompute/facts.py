"""Everything about replays in one trace: the fact that cost, findings and report build on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recompute_scan.model import Calls, Kernels, StepSpan, find_steps, link_kernels, nest
from recompute_scan.recompute.align import Alignment, align
from recompute_scan.recompute.blocks import Block, find_blocks
from recompute_scan.recompute.counts import Counts, complete_steps, count, join_steps
from recompute_scan.recompute.marks import Marks, read_marks
from recompute_scan.recompute.spans import spans_from_marks, spans_from_replays
from recompute_scan.recompute.structure import Structure, classify
from recompute_scan.recompute.verdict import Judgement, judge
from recompute_scan.recompute.work import Work, measure
from recompute_scan.trace.columns import Bool, Int64, Trace


@dataclass(frozen=True)
class Recompute:
    """What ran again in one trace.

    Attributes:
        trace: The trace.
        calls: Its host calls, nested.
        structure: Role of each call.
        kernels: Device work with its launches.
        work: Time of each call on the device that it kept busy.
        steps: Steps, in order.
        complete: For each step: does it hold a forward pass with its backward?
        alignment: The replays.
        counts: Multiplicity per forward operator.
        marks: The run wrapper's annotations, or ``None``.
        blocks: Blocks of every forward pass, in forward order.
        judgement: The verdict.
    """

    trace: Trace
    calls: Calls
    structure: Structure
    kernels: Kernels
    work: Work
    steps: tuple[StepSpan, ...]
    complete: Bool
    alignment: Alignment
    counts: Counts
    marks: Marks | None
    blocks: tuple[Block, ...]
    judgement: Judgement

    @property
    def complete_count(self) -> int:
        """Number of complete steps."""
        return int(self.complete.sum())

    def places(self, block: Block) -> Int64:
        """Positions of a block's operators in ``counts``."""
        return np.arange(block.span.first, block.span.last + 1)


def study(trace: Trace) -> Recompute:
    """Find the replays of a trace and judge them."""
    calls = nest(trace)
    structure = classify(calls)
    kernels = link_kernels(trace, calls)
    work = measure(calls, structure, kernels)
    steps = join_steps(calls, structure, find_steps(calls))
    starts = np.sort(np.array([step.start for step in steps], np.int64))
    alignment = align(calls, structure, work, starts)
    complete = complete_steps(calls, alignment, steps, trace.cut_at)
    counts = count(calls, structure, work, alignment, steps, complete)
    marks = read_marks(calls, structure, alignment)
    if marks is not None:
        spans = spans_from_marks(marks)
    else:
        spans = spans_from_replays(calls, structure, alignment)
    blocks = find_blocks(calls, counts, spans)
    return Recompute(
        trace=trace,
        calls=calls,
        structure=structure,
        kernels=kernels,
        work=work,
        steps=tuple(steps),
        complete=complete,
        alignment=alignment,
        counts=counts,
        marks=marks,
        blocks=tuple(blocks),
        judgement=judge(calls, structure, counts, blocks, alignment.unexplained),
    )
