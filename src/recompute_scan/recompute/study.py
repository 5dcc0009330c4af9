"""Everything about recomputes in one trace: the fact that cost, findings and report build on."""

from __future__ import annotations

import re
from functools import cached_property

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.alignment import (
    Alignment,
    Counts,
    align,
    complete_steps,
    count,
    join_steps,
)
from recompute_scan.recompute.attention_kernels import KernelEvidence, hides_backward, read_kernels
from recompute_scan.recompute.boundaries import (
    Annotations,
    Span,
    count_by_annotations,
    read_annotations,
    spans_from_annotations,
    spans_from_recomputes,
)
from recompute_scan.recompute.by_design import (
    Collectives,
    DesignedRun,
    find_by_design,
    find_collectives,
    without_own_work,
)
from recompute_scan.recompute.checks import PlainCounts, check_soundness, check_steps, count_plainly
from recompute_scan.recompute.frames import (
    Recognise,
    has_frames,
    name_blocks,
    spans_from_frames,
    with_frames,
)
from recompute_scan.recompute.layers import Block, find_blocks, group_blocks
from recompute_scan.recompute.roles import Role, Structure, Work, classify, measure
from recompute_scan.recompute.verdict import (
    HIDDEN_BY_COMPILER,
    HIDDEN_BY_GRAPHS,
    MOSTLY_COMPILED,
    Compiled,
    Judgement,
    as_designed,
    find_compiled_backward,
    judge,
    with_annotations,
    with_design,
)
from recompute_scan.result import EvidenceLevel
from recompute_scan.trace.calls import (
    Calls,
    Kernels,
    StepSpan,
    find_steps,
    link_kernels,
    nest,
    step_of,
)
from recompute_scan.trace.columns import Bool, Int8, Int64, Kind, Trace


class RecomputeFacts(Struct, frozen=True, dict=True):
    """The recomputes of one trace, and the evidence for them.

    Attributes:
        work: Time of each call on the device that it kept busy.
        complete: For each step: does it hold a forward pass with its backward?
        annotations: The run wrapper's annotations, or ``None``.
        blocks: Blocks of every forward pass, in forward order.
        plain: Forward operators by name, counted without the match.
        level: What the verdict rests on.
        compiled: The compiled part of the backward pass; ``None`` where nothing of it is compiled.
        attention: What attention's kernels say, where operators alone could not answer; the
            verdict rests on it only where ``level`` is ``kernels``.
        framed: Whether Python frames gave the checkpoint call sites.
        designed_runs: What runs again in other functions' gradients, without a checkpoint.
    """

    trace: Trace
    kernels: Kernels
    work: Work
    steps: tuple[StepSpan, ...]
    complete: Bool
    alignment: Alignment
    counts: Counts
    annotations: Annotations | None
    blocks: tuple[Block, ...]
    plain: PlainCounts
    judgement: Judgement
    level: EvidenceLevel
    compiled: Compiled | None
    attention: KernelEvidence | None
    framed: bool = False
    designed_runs: tuple[DesignedRun, ...] = ()

    @property
    def structure(self) -> Structure:
        """The role of each call."""
        return self.alignment.structure

    @property
    def calls(self) -> Calls:
        """The trace's host calls, nested."""
        return self.alignment.structure.calls

    @cached_property
    def designed_rows(self) -> Int64:
        """Rows of all calls that run again by design."""
        return np.array([row for each in self.designed_runs for row in each.rows], np.int64)

    @property
    def complete_count(self) -> int:
        """Number of complete steps."""
        return int(self.complete.sum())

    @property
    def whole_steps(self) -> list[StepSpan]:
        """The complete steps, in order."""
        return [step for step, whole in zip(self.steps, self.complete, strict=True) if whole]

    def in_whole_step(self, rows: Int64) -> Bool:
        """For each of these calls: did it begin in a complete step?"""
        return np.append(self.complete, False)[step_of(self.steps, self.calls.start[rows])]

    @cached_property
    def collectives(self) -> Collectives:
        """The collectives of complete steps, and those that recomputes repeat."""
        return find_collectives(self.alignment, self.kernels, self.steps, self.complete)

    @cached_property
    def layers(self) -> list[list[Block]]:
        """The blocks of all forward passes, grouped into layers, in forward order."""
        return group_blocks(self.calls, self.counts, self.blocks)

    @cached_property
    def sharded(self) -> bool:
        """Whether FSDP is at work."""
        return bool(len(self.calls.named(vocabulary.SHARDING)))

    @cached_property
    def turns(self) -> Int8:
        """For each call: 1 where it is a first recompute, 2 where a further one, else 0."""
        found = np.zeros(len(self.calls), np.int8)
        found[self.alignment.again] = 1
        found[self.counts.redundant_rows] = 2
        return found

    def ran_again(self, pattern: re.Pattern[str]) -> int:
        """How many calls with a name that matches from its beginning were recomputed."""
        again = self.alignment.again[self.alignment.ran]
        return int(self.calls.where(pattern.match)[again].sum())


def study(trace: Trace, recognise: Recognise | None = None) -> RecomputeFacts:
    """Find the recomputes of a trace and judge them.

    An operator's m takes these steps: :func:`classify` gives each call its role, :func:`align`
    finds the forward operator that each recomputed one repeats and the backward passes through it,
    and :func:`count` divides. :func:`judge` may take the annotations' counts instead.

    ``recognise`` names the mechanism that asks from a place in code. With it, Python frames in a
    trace without annotations give each checkpoint's call site.
    """
    calls = nest(trace)
    structure = classify(calls)
    trace = replace(trace, health=trace.health | check_soundness(structure))
    kernels = link_kernels(trace, calls)
    work = measure(structure, kernels)
    steps = join_steps(structure, find_steps(calls))
    starts = np.sort(np.array([step.start for step in steps], np.int64))
    alignment = align(structure, work, starts)
    alignment, own_runs = without_own_work(work, alignment)
    complete = complete_steps(alignment, steps, trace.cut_at)
    counts = count(work, alignment, steps, complete)
    trace = replace(trace, health=trace.health | check_steps(calls, counts))
    annotations, framed = read_annotations(alignment), list[Span]()
    if annotations is not None:
        spans = spans_from_annotations(alignment, annotations)
    else:
        spans = spans_from_recomputes(alignment)
        if recognise is not None and has_frames(trace):
            framed = spans_from_frames(trace, calls, alignment, recognise)
            spans = with_frames(spans, framed)
    blocks = name_blocks(trace, calls, counts, find_blocks(calls, counts, spans))
    designed_runs = (*find_by_design(trace, structure, kernels, alignment.again), *own_runs)
    facts = RecomputeFacts(
        trace=trace,
        kernels=kernels,
        work=work,
        steps=tuple(steps),
        complete=complete,
        alignment=alignment,
        counts=counts,
        annotations=annotations,
        blocks=blocks,
        plain=count_plainly(alignment),
        judgement=Judgement("inconclusive"),
        level="annotated" if annotations is not None else "autograd",
        compiled=find_compiled_backward(structure),
        attention=None,
        framed=bool(framed),
        designed_runs=designed_runs,
    )
    return _decided(facts)


def _decided(facts: RecomputeFacts) -> RecomputeFacts:
    """The facts with their verdict: by operators, or by attention's kernels where these show more.

    Nothing else sets ``judgement`` and ``level``, nor the counts that annotations or design give.
    """
    trace, calls, counts, annotated = facts.trace, facts.calls, facts.counts, None
    if facts.annotations is not None:
        annotated = count_by_annotations(facts.alignment, facts.annotations)
    unexplained = facts.alignment.unexplained
    unexplained = unexplained[~np.isin(unexplained, facts.designed_rows)]
    alignment = replace(facts.alignment, unexplained=unexplained)
    judgement = judge(replace(facts, alignment=alignment), annotated)
    if annotated is not None and judgement.by_annotations:
        counts = with_annotations(counts, annotated)
    if judgement.by_design:
        counts = as_designed(counts, facts.alignment)
    judgement = with_design(judgement, facts.designed_runs, counts)
    hidden = hides_backward(trace, facts.structure, facts.kernels)
    attention = None
    if hidden or judgement.verdict == "inconclusive":
        attention = read_kernels(trace, calls, facts.kernels)
    seen = _by_kernels(facts, judgement, attention, hidden)
    level: EvidenceLevel = facts.level if (calls.kind == Kind.OP).any() else "kernels"
    if attention is not None and seen is attention.judgement:
        level = "kernels"
    return replace(facts, counts=counts, judgement=seen, level=level, attention=attention)


def _by_kernels(
    facts: RecomputeFacts, judgement: Judgement, attention: KernelEvidence | None, hidden: bool
) -> Judgement:
    """The verdict by operators, or attention's where operators do not show the backward pass.

    Where operators show a part of it, attention that does not run again proves nothing: a compiler,
    like a selective checkpoint, may recompute all but attention.
    """
    compiled = facts.compiled is not None and facts.compiled.share >= MOSTLY_COMPILED
    if attention is None:
        hides = hidden and judgement.verdict != "doubled"
        return Judgement("inconclusive", HIDDEN_BY_GRAPHS) if hides else judgement
    seen = attention.judgement
    if hidden and not seen.highest and compiled:
        # Graphs of compiled code: attention clears them no more than without graphs.
        return Judgement("inconclusive", HIDDEN_BY_COMPILER)
    if hidden and judgement.verdict != "doubled":
        unknown = seen.verdict == "inconclusive"
        return Judgement("inconclusive", HIDDEN_BY_GRAPHS) if unknown else seen
    alone = not len(facts.structure.rows(Role.BACKWARD))
    return seen if judgement.verdict == "inconclusive" and (seen.highest or alone) else judgement
