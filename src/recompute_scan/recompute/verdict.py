"""From counts and blocks to the verdict, with the reason where there is none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.alignment import MATTERS, Alignment, Counts
from recompute_scan.recompute.boundaries import AnnotatedCounts
from recompute_scan.recompute.by_design import DesignedRun
from recompute_scan.recompute.layers import Block, leaves_layers
from recompute_scan.recompute.roles import Role, Structure
from recompute_scan.result import Verdict
from recompute_scan.trace.columns import Bool, Int64, Kind

if TYPE_CHECKING:
    from recompute_scan.recompute.study import RecomputeFacts


class Compiled(Struct, frozen=True):
    """The compiled nodes of a backward pass.

    Attributes:
        nodes: How many ran.
        share: Their share of the host time of the backward pass, 0..1, without recomputes in them.
        recomputes: Whether operators are in them that no gradient's formula has: attention's
            forward, a convolution, ``linear``. (``addmm`` proves nothing: Inductor makes it of a
            product and a sum, ``torch/_inductor/fx_passes/post_grad.py``.)
    """

    nodes: int
    share: float
    recomputes: bool


def find_compiled_backward(structure: Structure) -> Compiled | None:
    """The compiled part of the backward pass; ``None`` where nothing of it is compiled."""
    calls = structure.calls
    named = calls.where(vocabulary.COMPILED_NODE.match)
    engines = structure.rows(Role.BACKWARD)
    mine = engines[named[engines]]
    if not len(mine):
        return None
    # A node can hold the recompute that it asked for: that is not compiled into it.
    asked = np.isin(structure.engine, mine) & (structure.role == Role.RECOMPUTE)
    time = int(calls.duration[mine].sum()) - int(calls.duration[asked].sum())
    whole = int(calls.duration[structure.roots].sum())
    forward = calls.where(lambda name: vocabulary.only_forward(name) and name != "aten::addmm")
    rows = np.flatnonzero(forward & (structure.top >= 0) & (structure.engine >= 0))
    rows = rows[structure.role[structure.top[rows]] == Role.FORMULA]
    return Compiled(
        nodes=len(mine),
        share=min(1.0, max(0, time) / max(1, whole)),
        recomputes=bool(named[structure.engine[rows]].any()),
    )


# A block keeps some of its operators (selective checkpointing) when this share of them, or of those
# that are heavy, stands before its last recomputed one and does not run again.
HOLES = 0.05
# A backward pass that is compiled for at least this share of its time hides its recomputes.
MOSTLY_COMPILED = 0.5
# A mean below this is one recompute in each backward pass, with some that went through a part.
MORE_THAN_ONCE = 1.5
HIDDEN_BY_COMPILER = (
    "The backward pass is compiled, and a trace of operators does not show what the compiler "
    "recomputes in it."
)
HIDDEN_BY_GRAPHS = (
    "Most of the backward pass runs in graph launches, and the trace does not hold their operators."
)
NO_BACKWARD_OF_ITS_OWN = (
    "Most recomputed operators repeat forward work without a backward pass in the trace."
)
NO_BACKWARD_IN_HOOKS = (
    "{} checkpointed calls ran in gradient hooks, which begin other backward passes: their forward "
    "pass is part of a backward pass and looks like a recompute."
)


class Judgement(Struct, frozen=True):
    """The verdict and its three numbers (``None`` where the verdict is ``inconclusive``).

    Attributes:
        reason: Why there is no verdict, one sentence.
        highest: Highest m that matters.
        mean: Time-weighted mean m over the forward operators that have a backward.
        share: Share of their time that ran again at least once, 0..1.
        by_design: Whether nothing ran again but by design, which the numbers then count.
        by_annotations: Whether the annotations of recorded checkpoints gave the count, which the
            operators alone could not.
        differing: Names of operators of recomputes that the forward pass has not, as far as they
            are what kept the operators from giving the count.
    """

    verdict: Verdict
    reason: str | None = None
    highest: float | None = None
    mean: float | None = None
    share: float | None = None
    by_annotations: bool = False
    by_design: bool = False
    differing: tuple[str, ...] = ()


def judge(facts: RecomputeFacts, annotated: AnnotatedCounts | None = None) -> Judgement:
    """The verdict on a whole trace by its operators, or by annotations where these decide."""
    counts, counted, alignment = facts.counts, facts.counts.counted, facts.alignment
    names = counts.names(facts.calls, slice(None))
    recomputed = bool((counts.runs[counted] > 0).any())
    designed = not recomputed and bool((counts.designed[counted] > 0).any())
    recomputed |= designed
    reason = _why_inconclusive(facts, recomputed)
    annotated = annotated if facts.compiled is None else None
    by_annotations = with_annotations(counts, annotated) if annotated is not None else counts
    lost = _why_not_none(facts.structure, alignment.unexplained) if not recomputed else None
    unmatched, tally = lost, facts.plain.contradicting
    if unmatched is None and tally is not None:
        unmatched = (
            f"{tally.inside} calls of {tally.name} are inside the backward pass and "
            f"{tally.outside} outside, and {tally.again} of them were matched with the forward "
            "pass."
        )
    # Annotations can explain operators that no match explains.
    if reason is None and unmatched is not None and annotated is not None:
        found = _full_only_if_all(weigh(by_annotations, facts.blocks, names), facts, by_annotations)
        if found.highest == 1:
            return replace(found, by_annotations=True, differing=annotated.differing)
    reason = reason or lost
    highest = counts.highest(counted)
    if reason is None and highest < 2 and facts.compiled is not None and facts.compiled.recomputes:
        # The operators outside it then give a lower bound only.
        reason = (
            "The compiled backward pass runs forward work again; how often, and where, a trace "
            "of operators does not show."
        )
    reason = reason or unmatched
    if reason is None and highest >= 2 and annotated is not None:
        count = by_annotations.highest(counted)
        if count < MORE_THAN_ONCE:
            reason = (
                f"Operators ran again {highest:g} times in each backward pass, but the annotations "
                f"of the recorded checkpoints count {count:g}."
            )
        elif count != highest:
            found = weigh(by_annotations, facts.blocks, names)
            return replace(found, by_annotations=True, differing=annotated.differing)
    if reason is not None:
        differing = annotated.differing if annotated is not None else ()
        return Judgement("inconclusive", reason, differing=differing)
    if designed:
        again = weigh(as_designed(counts, alignment), facts.blocks, names)
        return replace(again, verdict="partial", by_design=True)
    # The counts have more places than the trace where compiled code is taken apart.
    same = len(alignment.forward) == len(counts.runs)
    otherwise = _ran_otherwise(facts.structure, alignment) if same else None
    return _full_only_if_all(weigh(counts, facts.blocks, names, otherwise), facts, counts)


def _full_only_if_all(found: Judgement, facts: RecomputeFacts, counts: Counts) -> Judgement:
    """The verdict, but not `full` where some layers are no blocks, or some steps recompute none."""
    step, weight = counts.step[counts.counted], counts.weight[counts.counted]
    idle = ~np.isin(step, step[counts.runs[counts.counted] > 0])
    left = idle.any() and weight[idle].sum() >= MATTERS * weight.sum()
    if found.verdict != "full" or not (left or leaves_layers(facts.calls, counts, facts.blocks)):
        return found
    return replace(found, verdict="partial")


def _ran_otherwise(structure: Structure, alignment: Alignment) -> Bool:
    """For each forward operator: did its checkpoint function take another way past it?

    A checkpoint function keeps no results of its block. So where its node ran operators that the
    forward pass has not, the recompute ran them in place of the operators that are not found again.
    """
    found = np.zeros(len(alignment.forward), np.bool_)
    engines = {*structure.engine[alignment.unexplained].tolist()}
    for each in alignment.recomputes:
        if each.engine in engines and structure.checkpoint_node[each.engine]:
            first, last = alignment.forward.searchsorted(each.original[[0, -1]]).tolist()
            found[first : last + 1] = True
    return found


def as_designed(counts: Counts, alignment: Alignment) -> Counts:
    """The counts of operators that functions and the model ran again by design."""
    runs = counts.designed
    return replace(counts, runs=runs, m=runs / alignment.passes)


def with_annotations(counts: Counts, annotated: AnnotatedCounts) -> Counts:
    """The counts, with how often the annotations say that each operator ran again.

    What its recomputes took is not known where the operators themselves were not found again.
    """
    return replace(counts, runs=annotated.runs, m=annotated.runs / annotated.passes)


def weigh(
    counts: Counts,
    blocks: Sequence[Block],
    names: Sequence[str],
    otherwise: Bool | None = None,
) -> Judgement:
    """The verdict that counts and blocks come to.

    Args:
        counts: The counts.
        blocks: The blocks of all forward passes.
        names: Names of the operators counted; empty where the operators are a graph's.
        otherwise: Operators that a recompute replaced by others; none by default.
    """
    known = {name: vocabulary.forward_only(name) for name in {*names}}
    heavy = np.zeros(len(counts.rows), np.bool_)
    heavy[: len(names)] = [known[name] for name in names]
    counted = counts.counted
    highest = counts.highest(counted)
    weight = counts.weight[counted]
    again = (counts.m[counted] > 0) | (counts.designed[counted] > 0)
    share = float(weight[again].sum() / weight.sum()) if weight.sum() else float(again.mean())
    verdict: Verdict
    if not (counts.runs[counted] > 0).any():
        verdict = "none"
    elif highest >= 2:
        verdict = "doubled"
    elif blocks and all(_whole(counts, block, heavy, otherwise) for block in blocks):
        verdict = "full"
    else:
        verdict = "partial"
    return Judgement(verdict, None, highest, counts.mean(counted), share)


def _whole(counts: Counts, block: Block, heavy: Bool, otherwise: Bool | None) -> bool:
    """Did all of a block run again, but for what early stop leaves out at its end?

    Operators are counted: how long they take differs with the machine and what else it does.
    """
    places = np.arange(block.span.first, block.span.last + 1)
    again = counts.runs[places] > 0
    if not again.any():
        return False
    hole = np.zeros(len(places), np.bool_)
    hole[: int(np.flatnonzero(again)[-1])] = ~again[: int(np.flatnonzero(again)[-1])]
    if otherwise is not None:
        hole &= ~otherwise[places]
    counted = counts.counted[places]
    return all(
        np.count_nonzero(hole & kind) <= HOLES * np.count_nonzero(kind)
        for kind in (heavy[places] & counted, counted)
    )


def _why_not_none(structure: Structure, unexplained: Int64) -> str | None:
    """The reason not to say `none`: a checkpoint function's node exists to recompute."""
    if structure.checkpoint_node[structure.engine[unexplained]].any():
        return (
            "An autograd function ran work in its backward that was not found in the forward "
            "pass, so it is unknown how often anything ran again."
        )
    return None


def _why_inconclusive(facts: RecomputeFacts, recomputed: bool) -> str | None:
    calls, structure, counts = facts.calls, facts.structure, facts.counts
    if not (calls.kind == Kind.OP).any():
        if not (facts.trace.kind[facts.kernels.event] == Kind.KERNEL).any():
            return "The trace has neither operators nor kernels."
        return (
            "The trace has no operators, only kernels, and no kernel is known as the backward of "
            "attention."
        )
    if not len(structure.rows(Role.BACKWARD)):
        # Autograd numbers operators only where a backward pass may follow.
        numbered = calls.sequence[structure.rows(Role.FORWARD)] >= 0
        if 2 * int(numbered.sum()) > len(numbered):
            return "The backward pass was not recorded; the trace holds a forward pass only."
        return "The trace holds no backward pass."
    if not counts.counted.any():
        return "The trace has no forward pass together with its backward pass."
    found = [each for each in facts.alignment.recomputes if not each.by_design]
    sizes = np.array([len(each.again) for each in found], np.int64)
    # Among operators that have a backward, those without need no gradient.
    places = (counts.rows.searchsorted(each.original) for each in found)
    alone = np.array([not counts.counted[some].any() for some in places], np.bool_)
    if 2 * sizes[alone].sum() > sizes.sum():
        in_hooks = facts.annotations.in_hooks if facts.annotations is not None else 0
        return NO_BACKWARD_IN_HOOKS.format(in_hooks) if in_hooks else NO_BACKWARD_OF_ITS_OWN
    if facts.compiled is not None and facts.compiled.share >= MOSTLY_COMPILED and not recomputed:
        return HIDDEN_BY_COMPILER
    return None


def with_design(judgement: Judgement, found: Sequence[DesignedRun], counts: Counts) -> Judgement:
    """The verdict with these: no checkpoint, and yet forward work that runs again, once."""
    if judgement.verdict != "none" or not found:
        return judgement
    highest = max(max(1, math.ceil(each.again / each.forward)) for each in found)
    again = sum(each.time for each in found)
    forward_time = float(counts.weight[counts.counted].sum())
    share = min(1.0, again / forward_time) if forward_time > 0 else None
    return Judgement("partial", None, float(highest), share, share)
