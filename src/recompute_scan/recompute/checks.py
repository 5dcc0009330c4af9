"""How sure the answer is, by two checks: a plain count by name, and whether the trace is sound.

The plain count takes forward operators by name, inside the backward pass and outside. It does not
use the match with the forward pass, shapes or order. An operator that only a forward pass has
(attention, ``linear``, a convolution, a norm) is inside the backward pass where an evaluation of a
node holds it. Where the match gives other numbers, one of the two is wrong.

Operators without gradients are left out: they are no training forward pass, or belong to a formula.
The call of an autograd function counts, since a reentrant checkpoint runs its block in one. An
operator in an evaluation but outside its node is a gradient hook's and counted apart. A loss that
computes its gradient in chunks runs them again in its formula: that is left out too.

Events that lost their times, names, threads or numbers still make a tree of calls and an answer.
The soundness check compares what the trace states twice:

* the engine opens a range around each node (``torch/csrc/autograd/engine.cpp``,
  ``evaluate_function``), and a range with the node's name is in it;
* a node has the number of an operator that ran before it, and is named after that operator
  (``torch/csrc/autograd/function.h``, ``sequence_nr``; ``AddmmBackward0`` after ``aten::addmm``);
* operators of one name and of the same shapes run the same operators inside, as a rule: in traces
  of torch 1.9 to 2.13 up to seven in a thousand do not;
* where some events of a name have shapes, all have.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from recompute_scan.numpy_tools import changes, places_of
from recompute_scan.recompute import vocabulary
from recompute_scan.recompute.alignment import Alignment, Counts
from recompute_scan.recompute.evaluations import nodes_of_ranges, twins_of
from recompute_scan.recompute.roles import LOOKED_THROUGH, Role, Structure
from recompute_scan.result import Level
from recompute_scan.trace.calls import Calls
from recompute_scan.trace.columns import Bool, Int64, Ints, Kind
from recompute_scan.trace.health import lost_evidence, sentences

if TYPE_CHECKING:
    from recompute_scan.recompute.study import RecomputeFacts

# Counts may differ by this share of the forward pass's, and by one operator.
_TOLERANCE = 0.02
_STRAY = 1
# With more than this share of the forward pass's unexplained there is no verdict.
_CONTRADICTS = 0.1


class Tally(Struct, frozen=True):
    """One name of operators over the whole trace.

    Attributes:
        outside: How many ran outside any backward pass.
        inside: How many ran inside one, including hooks.
        hooked: How many of these a gradient hook ran.
        forward: How many of the match's forward operators they make up.
        again: How many of those that the match says ran again.
    """

    name: str
    outside: int
    inside: int
    hooked: int
    forward: int
    again: int

    @property
    def agrees(self) -> bool:
        """Do both counts come to the same, outside and inside?"""
        return self._alike(self.inside, self.again) and self._alike(self.outside, self.forward)

    @property
    def contradicts(self) -> bool:
        """Did more, or fewer, run inside than the match, hooks and stray calls explain?"""
        left = max(self.inside - self.again - self.hooked, self.again - self.inside)
        return left > max(_STRAY, _CONTRADICTS * self.outside)

    def _alike(self, one: int, other: int) -> bool:
        return abs(one - other) <= max(_STRAY, _TOLERANCE * max(self.outside, self.inside))


class PlainCounts(Struct, frozen=True):
    """Every name counted, attention first; empty where the trace has no such operator."""

    tallies: tuple[Tally, ...]

    @property
    def agrees(self) -> bool | None:
        """Does every name agree? ``None`` where there is nothing to count."""
        return all(tally.agrees for tally in self.tallies) if self.tallies else None

    @property
    def contradicting(self) -> Tally | None:
        """The first name with too many calls that nothing explains."""
        return next((tally for tally in self.tallies if tally.contradicts), None)


def plainly_counted(structure: Structure) -> Int64:
    """Rows of the operators that the plain count counts."""
    calls = structure.calls
    rows = _named(calls, vocabulary.forward_only)
    if not len(rows):
        rows = _named(calls, vocabulary.light_forward)
    losses = vocabulary.nodes_of(structure.functions.losses)
    formula = calls.within(_named(calls, losses.__contains__))
    return rows[_with_gradients(structure, rows) & ~formula[rows] & ~twins_of(calls)[rows]]


def count_plainly(alignment: Alignment) -> PlainCounts:
    """The plain count next to the match's; see :class:`PlainCounts`."""
    calls, structure = alignment.structure.calls, alignment.structure
    rows = plainly_counted(structure)
    table = structure.evaluations
    inside = table.of[rows] >= 0
    # AccumulateGrad asks for no saved tensor, and runs hooks.
    hooking = np.append(calls.where(vocabulary.ACCUMULATE_GRAD.__eq__)[table.row], False)
    hooked = inside & (~table.in_node[rows] | hooking[table.of[rows]])
    forward, again, ran = np.zeros((3, len(calls) + 1), np.int64)
    forward[alignment.forward] = 1
    np.add.at(again, alignment.again, 1)
    for recompute in alignment.recomputes:
        np.add.at(ran, recompute.again[recompute.ran], 1)
    top = structure.top[rows]  # -1, of no operator, is the last entry

    def per_name(weights: Ints | Bool) -> list[int]:
        counts = np.bincount(calls.name[rows], weights=weights, minlength=len(calls.names))
        found: list[int] = counts.astype(np.int64).tolist()
        return found

    columns = [per_name(column) for column in (~inside, inside, hooked, forward[top], again[top])]
    tallies = [
        Tally(calls.names[code], *(column[code] for column in columns))
        for code in np.unique(calls.name[rows]).tolist()
    ]
    # Entered, and cut short, or the results were kept: the count cannot see that.
    entered = {calls.names[code] for code in np.unique(calls.name[rows[again[top] > ran[top]]])}

    def most_telling(tally: Tally) -> tuple[bool, bool, bool, int, str]:
        attention = vocabulary.family_of(tally.name)[1] == "attention"
        inner = tally.name.rpartition("::")[2].startswith("_")
        return tally.name in entered, not attention, inner, -tally.outside, tally.name

    return PlainCounts(tuple(sorted(tallies, key=most_telling)))


def _named(calls: Calls, wanted: Callable[[str], bool]) -> Int64:
    return np.flatnonzero(calls.where(wanted) & (calls.kind == Kind.OP))


def _with_gradients(structure: Structure, rows: Int64) -> Bool:
    """For each row: did it run with gradients on, or for a function that has a node?

    An operator inside one with a number has no number: a convolution's kernels are called by
    such a one, and by the formula of a gradient's gradient, which has no number either. Torch
    before 2.4 gives out no numbers under a dispatch mode. So all operators of a name count where
    most of them in the forward pass have no number.
    """
    calls = structure.calls
    names = set(calls.names)
    functions = _named(calls, lambda name: f"{name}Backward" in names)
    given = rows[calls.sequence[rows] >= 0]
    numbered = calls.within(np.union1d(given, functions))[rows]
    outside = structure.evaluations.of[rows] < 0
    size = len(calls.names)
    every = np.bincount(calls.name[rows[outside]], minlength=size)
    known = np.bincount(calls.name[rows[outside & numbered]], minlength=size)
    return np.asarray(numbered | (2 * known < every)[calls.name[rows]])


# Where some are found, so many are in a short trace, too: a step of Megatron's has two of 90 nodes.
_SOUNDNESS_STRAY = 2
# Operators inside others are compared where there are so many of a kind. A difference in more than
# this share of them is no exception.
_KIND, _RULE = 4, 0.1
# No more names than these are looked at for one number: an operator has a few inside it.
_MOST_NAMES = 64
# Nodes of these names have no operator in the forward pass; of an archive's aliases it is unknown.
# A view that was changed in place has AsStrided (variable.cpp, VariableHooks::grad_fn).
_NO_OPERATOR = re.compile(
    r"torch::(autograd::(AccumulateGrad|GraphRoot|CopySlices)$|jit::)|[Pp]rivate_op_\d|AsStridedB"
)
# It calls the node of the operation on the slice itself, without the engine.
_COPY_SLICES = "torch::autograd::CopySlices"
# Named by what they compute; others (TorchScript's, C++ functions') have other names.
_NAMED = re.compile(r"([A-Z]\w*?)Backward\d*$")


def check_soundness(structure: Structure) -> dict[str, int]:
    """Counters of contradictions; empty for a sound trace.

    Under each name how many there are, and with ``_of`` behind it, of how many.
    """
    counters: dict[str, int] = {}
    for name, share, find in (
        # Smaller shares are found in sound traces.
        ("nodes_apart", 0.0, _nodes_apart),
        ("numbers_astray", 0.01, _numbers_astray),
        ("operators_unlike", 0.015, _operators_unlike),
        ("shapes_missing", 0.0, _shapes_missing),
    ):
        number, of = find(structure)
        if number > (share and max(_SOUNDNESS_STRAY, share * of)):
            counters |= {name: number, f"{name}_of": of}
    return counters


def check_steps(calls: Calls, counts: Counts) -> dict[str, int]:
    """Counter of steps that recompute other operators than most that run the same forward pass.

    ``recomputes_uneven``, and with ``_of`` behind it how many steps there are; empty where none do.
    """
    recomputes: dict[int, list[int]] = {}
    names = _mixed(calls.name[counts.rows])
    counted = np.flatnonzero(counts.counted)
    for places in places_of(counts.step[counted]).values():
        mine = counted[places]
        again = names[mine] * counts.runs[mine].astype(np.uint64)
        recomputes.setdefault(int(names[mine].sum()), []).append(int(again.sum()))
    uneven = sum(len(alike) - Counter(alike).most_common(1)[0][1] for alike in recomputes.values())
    of = sum(map(len, recomputes.values()))
    return {"recomputes_uneven": uneven, "recomputes_uneven_of": of} if uneven else {}


def _nodes_apart(structure: Structure) -> tuple[int, int]:
    """Engine ranges without their node in them, and nodes in no such range; of how many."""
    calls = structure.calls
    operator = calls.kind == Kind.OP
    ranges = calls.where(lambda name: name.startswith(vocabulary.ENGINE))
    engines = np.flatnonzero(ranges & operator & ~_unasked(structure))
    if not len(engines):
        return 0, 0  # torch 1.8 to 1.10 opened none
    node_of = nodes_of_ranges(calls)
    is_node = calls.names_where(_NAMED.match)
    is_node[node_of[node_of >= 0]] = True
    nodes = np.flatnonzero(is_node[calls.name] & operator)
    above = calls.parent[nodes]
    inside = (above >= 0) & (node_of[calls.name[np.maximum(above, 0)]] == calls.name[nodes])
    holding = np.unique(above[inside])
    copies = calls.where(_COPY_SLICES.__eq__)
    outside = ~inside & ~((above >= 0) & copies[np.maximum(above, 0)])
    return len(engines) - len(holding) + int(outside.sum()), len(engines)


def _unasked(structure: Structure) -> Bool:
    """Ranges of nodes with an unneeded result: opened, without a number, and empty."""
    return np.asarray((structure.calls.size == 0) & (structure.number < 0))


def _numbers_astray(structure: Structure) -> tuple[int, int]:
    """Nodes with a number that leads to no earlier operator that they are named after."""
    calls = structure.calls
    engines = structure.rows(Role.BACKWARD)
    names = [name.removeprefix(vocabulary.ENGINE) for name in calls.names]
    asking = np.array([_NO_OPERATOR.match(name) is None for name in names], np.bool_)
    engines = engines[asking[calls.name[engines]] & ~_unasked(structure)[engines]]
    nodes = np.array([_NAMED.match(name) is not None for name in names], np.bool_)
    own = calls.sequence.copy()
    own[structure.filled] = structure.number[structure.filled]
    rows = np.flatnonzero(
        (calls.kind == Kind.OP)
        & (own >= 0)
        & (structure.role != Role.BACKWARD)
        & ~nodes[calls.name]
    )
    rows = _first_to_end(calls, rows, own)
    numbers = own[rows]
    wanted = structure.number[engines]
    first = numbers.searchsorted(wanted)
    many = np.where(wanted >= 0, numbers.searchsorted(wanted, side="right") - first, 0)
    asker = np.repeat(np.arange(len(engines)), many)
    within = np.arange(len(asker)) - np.repeat(many.cumsum() - many, many)
    operator = rows[first.repeat(many) + within]
    node = engines[asker]
    earlier = calls.end[operator] <= calls.start[node]
    fits = earlier & _belong_together(names, calls.name[node], calls.name[operator], asker)
    led = np.zeros(len(engines), np.bool_)
    led[asker[fits]] = True
    return int((~led).sum()), len(engines)


def _first_to_end(calls: Calls, rows: Int64, number: Ints) -> Int64:
    """Of the calls of one name and number that which ended first, sorted by their numbers.

    So a number that a whole trace shares costs no more than others: work would be the product of
    its operators and its nodes.
    """
    rows = rows[np.lexsort((calls.end[rows], calls.name[rows], number[rows]))]
    rows = rows[changes(number[rows], calls.name[rows])]
    begins = np.flatnonzero(changes(number[rows]))
    place = np.arange(len(rows)) - begins.repeat(np.diff(begins, append=len(rows)))
    return rows[place < _MOST_NAMES]


def _belong_together(names: list[str], node: Ints, operator: Ints, asker: Ints) -> Bool:
    """For each pair of codes: does the node's name come from the operator's, or go with it?

    It goes with it where most nodes of the name have such an operator. True where the node's name
    comes from no operator's.
    """
    if not len(node):
        return np.zeros(0, np.bool_)
    pairs, place = np.unique(node.astype(np.int64) * len(names) + operator, return_inverse=True)
    spelt = [_comes_from(names[pair // len(names)], names[pair % len(names)]) for pair in pairs]
    many = int(asker[-1]) + 1  # they are in order
    having = np.bincount(np.unique(place * many + asker) // many, minlength=len(pairs))
    first = np.flatnonzero(changes(asker))
    of_node = np.bincount(node[first], minlength=len(names))
    usual = 2 * having > of_node[pairs // len(names)]
    return np.asarray((np.array(spelt, np.bool_) | usual)[place])


def _comes_from(node: str, operator: str) -> bool:
    named = _NAMED.match(node)
    if named is None or _NO_OPERATOR.match(operator):
        return True
    one, two = vocabulary.plain(named[1]), vocabulary.plain(operator)
    return one.startswith(two) or two.startswith(one)


def _operators_unlike(structure: Structure) -> tuple[int, int]:
    """Operators that run inside what hardly another of their kind runs; of how many."""
    calls = structure.calls
    operator = calls.kind == Kind.OP
    rows = np.flatnonzero(operator & ~LOOKED_THROUGH[structure.role])
    number = len(rows)
    above = calls.parent[rows]
    within = (above >= 0) & operator[np.maximum(above, 0)]
    shapes = int(calls.dims.max(initial=0)) + 1
    known, shaped = np.unique(
        calls.name[rows].astype(np.int64) * shapes + calls.dims[rows], return_inverse=True
    )
    # A sum of numbers that stand for name and shapes: equal for equal ones, in any order.
    inside = np.zeros(len(calls), np.uint64)
    np.add.at(inside, above[within], _mixed(known)[shaped[within]])
    around = np.where(within, calls.name[np.maximum(above, 0)], -1).astype(np.int64)
    in_backward = structure.engine[rows] >= 0
    places = 2 * (len(calls.names) + 1)
    _, kind = np.unique(shaped * places + 2 * (around + 1) + in_backward, return_inverse=True)
    all_of = np.bincount(kind, minlength=1)
    rows, kind = rows[all_of[kind] >= _KIND], kind[all_of[kind] >= _KIND]
    _, both = np.unique(_mixed(kind) ^ inside[rows], return_inverse=True)
    alike = np.bincount(both, minlength=1)[both]
    most = np.zeros(len(all_of), np.int64)
    np.maximum.at(most, kind, alike)
    # An operator with results of a size that the data give (nonzero) runs another thing each time.
    usual = 2 * most[kind] > all_of[kind]
    unlike = usual & (alike < np.maximum(_RULE * all_of[kind], 2))
    return int(unlike.sum()), number


def _shapes_missing(structure: Structure) -> tuple[int, int]:
    """Operators without shapes where most of the same name have them; of how many."""
    calls = structure.calls
    rows = np.flatnonzero(calls.kind == Kind.OP)
    name, shaped = calls.name[rows], calls.dims[rows] > 0
    of_name = np.bincount(name, minlength=1)
    with_shapes = np.bincount(name[shaped], minlength=len(of_name))
    missing = ~shaped & (2 * with_shapes[name] > of_name[name])
    return int(missing.sum()), len(rows)


def _mixed(numbers: Ints) -> npt.NDArray[np.uint64]:
    """Each number spread over 64 bits, as splitmix64 does; equal for equal ones alone."""
    mixed = numbers.astype(np.uint64)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    return mixed


# The confidence

_DOUBTFUL_SHARE = 0.02
_DOUBTFUL_NUMBER = 3
_MANY_UNLAUNCHED = 0.3
# Calls with a guessed place among the others, as shares of all calls: their times are equal to, or
# cross, the times of another call. Measured on traces cut to whole microseconds: up to 0.14 % and
# every answer right on hosts as fast as today's; the first wrong answer at 0.35 %, and over 2.5 %
# where a file's order was lost. No call crosses another in any recording of ours (torch 2.1 to
# 2.14).
_SOME_GUESSED, _MANY_GUESSED = 0.002, 0.02


def confidence(facts: RecomputeFacts, *, one_count: bool = False) -> Level:
    """How sure the counts are, by written rules (``docs/design.md``).

    ``one_count``: the plain count saw no counted operator.
    """
    attention = facts.attention if facts.level == "kernels" else None
    guessed, annotations = _guesses_places(facts, _MANY_GUESSED), facts.annotations
    if facts.judgement.by_annotations:
        return "low" if guessed else "medium"
    unlaunched = facts.work.unlaunched > _MANY_UNLAUNCHED * max(1, len(facts.kernels.event))
    unsure = guessed or unlaunched
    if annotations is not None and _annotations_disagree(facts):
        unsure |= annotations.disagreeing > annotations.recomputed
    if facts.judgement.verdict == "inconclusive" or unsure:
        return "low"
    if attention is not None:
        told = attention.by_thread and attention.steps_marked and not _disagreeing_steps(facts)
        return "medium" if told else "low"
    lost = lost_evidence(facts.trace.health)
    alone = facts.plain.agrees is not True or one_count
    doubtful = _annotations_disagree(facts) or facts.complete_count < 2 or _disagreeing_steps(facts)
    return "medium" if lost or doubtful or alone or _guesses_places(facts) else "high"


def _guesses_places(facts: RecomputeFacts, most: float = _SOME_GUESSED) -> bool:
    """Is the place of more than this share of the calls a guess?"""
    return facts.calls.guessed + facts.calls.overruns > most * len(facts.calls)


def _annotations_disagree(facts: RecomputeFacts) -> bool:
    """Do the run wrapper's annotations and the operators differ by more than a stray few?"""
    annotations = facts.annotations
    return annotations is not None and annotations.disagreeing > max(
        _DOUBTFUL_NUMBER, _DOUBTFUL_SHARE * annotations.recomputed
    )


def doubts(facts: RecomputeFacts) -> tuple[str, ...]:
    """Doubts about the evidence for the reader, one sentence each."""
    found = list(sentences(facts.trace.health, len(facts.trace)))
    if _guesses_places(facts):
        found.extend(_guesses(facts.calls))
    if facts.framed:
        found.append(
            "Checkpoint call sites come from Python frames. So each line is the first line of the "
            "function that calls the checkpoint, and the setting that switched it on is unknown."
        )
    if facts.attention is not None and facts.level == "kernels":
        found.extend(facts.attention.notes)
    if differing := _disagreeing_steps(facts):
        said = ", ".join(
            f"{step} ({'not known' if runs is None else f'{runs:g}'})"
            for step, runs in differing.items()
        )
        found.append(f"Steps that differ in how often work runs again (in brackets): {said}.")
    if facts.judgement.by_annotations:
        # The operators could not give it.
        names = ", ".join(facts.judgement.differing)
        which = f" (of {names})" if names else ""
        found.append(
            f"Not all calls{which} in the recomputes could be matched with the calls of the "
            "forward pass that they repeat, so operators alone do not show how often work ran "
            "again. The annotations that the recording put around each checkpointed call gave the "
            "count; the cost of the recomputes is not known."
        )
    elif facts.annotations is not None and _annotations_disagree(facts):
        found.append(
            f"The annotations of the recorded checkpoints and the operators disagree on "
            f"{facts.annotations.disagreeing} of {facts.annotations.recomputed} recomputed "
            "operators; the counts come from the operators."
        )
    if not facts.judgement.by_annotations:
        found.extend(_plain_doubts(facts))
    if unlaunched := facts.work.unlaunched:
        every = len(facts.kernels.event)
        found.append(
            "No device activity has a record of its launch, so none belongs to an operator."
            if unlaunched == every
            else f"{unlaunched} of {every} device activities have no record of their launch and "
            f"belong to no operator{_why_unlaunched(facts)}."
        )
    return tuple(found)


def _why_unlaunched(facts: RecomputeFacts) -> str:
    """The known reason why there is none, for the end of a sentence."""
    queued = facts.work.queued
    if queued == facts.work.unlaunched:
        return ": recording began while the GPU still had a queue"
    return f"; {queued} of them were launched before recording began" if queued else ""


def _guesses(calls: Calls) -> list[str]:
    """Why the place of some calls is a guess."""
    found = []
    if calls.guessed:
        found.append(
            "Times are whole microseconds, so for "
            f"{calls.guessed} of {len(calls)} calls the parent call is a guess."
        )
    if calls.overruns:
        found.append(
            f"{calls.overruns} of {len(calls)} calls end after the call in which they began. That "
            "cannot happen: times or threads in the trace are wrong."
        )
    return found


def _plain_doubts(facts: RecomputeFacts) -> list[str]:
    """Why the plain count lowers the confidence, where it does."""
    if facts.level == "kernels" or facts.judgement.verdict == "inconclusive":
        return []
    if facts.plain.agrees is None:
        return [
            "No operator in the trace belongs to a forward pass by its name alone, so no "
            "second count checks the first."
        ]
    differing = [tally for tally in facts.plain.tallies if not tally.agrees]
    if not differing:
        return []
    tally = differing[0]
    hooks = f", {tally.hooked} of them run by gradient hooks" if tally.hooked else ""
    return [
        f"The plain count differs: {tally.inside} calls of {tally.name} are inside the backward "
        f"pass{hooks}, and the answer explains {tally.again}."
    ]


def _disagreeing_steps(facts: RecomputeFacts) -> dict[int, float | None]:
    """The highest m that matters of each complete step where it is not the commonest.

    By the step's number; ``None`` where a step's attention kernels cannot be read.
    """
    found: dict[int, float | None] = {}
    counts = facts.counts
    if facts.level == "kernels":
        steps = facts.attention.steps if facts.attention else ()
        found = {step.span.index: step.highest for step in steps}
    else:
        counted = np.flatnonzero(counts.counted)
        for place, mine in places_of(counts.step[counted]).items():
            if place >= 0:
                found[facts.steps[place].index] = counts.highest(counted[mine])
    if not found:
        return {}
    (commonest, _), *_ = Counter(found.values()).most_common()
    return {step: value for step, value in found.items() if value != commonest}
