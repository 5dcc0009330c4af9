"""Every run of every forward operator again: in which recompute, by which checkpoint, how."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from msgspec import Struct

from recompute_scan.numpy_tools import changes
from recompute_scan.recompute.study import RecomputeFacts
from recompute_scan.result import Checkpoint
from recompute_scan.trace.columns import Bool, Int64

# How many operators at the end of a block early stop leaves out at most: what follows the last
# one whose inputs are saved, such as the addition of a residual.
_LEFT_OUT = 2

# Of the checkpoints around a block, outermost first, the one that stays; None for none.
Keep = Callable[[Sequence[Checkpoint]], Checkpoint | None]


class OpSequence(Struct, frozen=True):
    """Operators of one recompute, in a row, that belong to the same block, or part of one.

    Attributes:
        recompute: Position in ``Alignment.recomputes``.
        first: Position of the first of them in that recompute.
        stop: Position behind the last.
        checkpoints: Those around their block, outermost first; empty where unknown.
        run: Which run again it is, from 0.
        runs: How many runs again these operators have.
    """

    recompute: int
    first: int
    stop: int
    checkpoints: tuple[Checkpoint, ...]
    run: int
    runs: int


def find_sequences(facts: RecomputeFacts, here: Bool) -> list[OpSequence]:
    """Recomputes, cut where the block's checkpoints or the number of runs change.

    Args:
        facts: What ran again.
        here: For each call: does it count? A recompute does whose first or last operator, or that
            of its first run, counts.
    """
    alignment = facts.alignment
    if not alignment.recomputes:
        return []
    edges = np.append(alignment.begins, len(alignment.again))
    ends = np.concatenate([edges[:-1], edges[1:] - 1]).reshape(2, -1)
    touched = here[alignment.again[ends]].any(axis=0) | here[alignment.original[ends]].any(axis=0)
    touched &= ~np.array([each.by_design for each in alignment.recomputes], np.bool_)
    chosen = np.flatnonzero(touched).tolist()
    if not chosen:
        return []
    stacks: dict[tuple[Checkpoint, ...], int] = {(): 0}
    stack = np.zeros(len(alignment.forward), np.int64)
    block = np.full(len(alignment.forward), -1, np.int64)
    number = 0
    for whole in facts.blocks:
        for one in (whole, *whole.parts):
            stack[one.places] = stacks.setdefault(one.checkpoints, len(stacks))
            block[one.places] = number
            number += 1
    kinds = list(stacks)
    seen = np.zeros(len(alignment.forward), np.int64)
    runs = np.zeros(len(alignment.forward), np.int64)
    places_of = [alignment.places[edges[number] : edges[number + 1]] for number in chosen]
    for places in places_of:
        np.add.at(runs, places, 1)
    runs = runs // alignment.passes
    found = []
    for number, places in zip(chosen, places_of, strict=True):
        run = seen[places] % np.maximum(runs[places], 1)
        seen[places] += 1
        for first, stop in _pieces(block[places], runs[places] * (run.max() + 1) + run):
            place = places[first]
            found.append(
                OpSequence(
                    recompute=number,
                    first=int(first),
                    stop=int(stop),
                    checkpoints=kinds[stack[place]],
                    run=int(run[first]),
                    runs=int(runs[place]),
                )
            )
    return found


def find_reaches(facts: RecomputeFacts, sequences: Sequence[OpSequence]) -> list[tuple[int, int]]:
    """For each piece: places in its recompute from which and up to which all goes with it.

    What a function does before or behind its block goes with that, and not for itself: for such
    work both are 0.
    """
    known = [one for one in sequences if one.checkpoints]
    begins = {one.recompute: one.first for one in reversed(known)}
    ends = {one.recompute: one.stop for one in known}
    found = []
    for one in sequences:
        again = facts.alignment.recomputes[one.recompute].again
        begin, end = begins.get(one.recompute, 0), ends.get(one.recompute, len(again))
        if end < len(again) and facts.structure.function[again[end]] < 0:
            end = len(again)
        if one.stop <= begin or one.first >= end:
            found.append((0, 0))
            continue
        first = 0 if one.first <= begin else one.first
        found.append((first, len(again) if one.stop == end else one.stop))
    return found


def _pieces(block: Int64, kind: Int64) -> Iterator[tuple[int, int]]:
    """Cuts where the block changes, and inside one where the kind does for more than a few.

    Early stop leaves out the last operators of a recompute, so these run less often than the rest
    of their block without belonging to another checkpoint.
    """
    first = 0
    cuts = np.flatnonzero(changes(block, kind))[1:]
    for cut, following in itertools.pairwise([*cuts.tolist(), len(block)]):
        short = following - cut <= _LEFT_OUT and block[cut] == block[first]
        if not short:
            yield first, cut
            first = cut
    yield first, len(block)


def with_gradients(facts: RecomputeFacts, rows: Int64) -> bool:
    """Were most of these operators recorded by autograd? Then they carry its numbers."""
    return bool(np.count_nonzero(facts.structure.number[rows] >= 0) * 2 > len(rows))
