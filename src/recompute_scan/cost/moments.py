"""What every arrangement of checkpoints holds at the moments that can be the fullest.

What is held at a moment is a sum over storages, each counted once however many hold it. An operator
inside a module holds what it saves where the module is not recomputed; a checkpoint holds the
module's inputs, and while its recompute is used everything that the module saves. A selective one
holds the results of heavy operators beside the inputs, each until its recompute has come to it.
What an offloaded module saves is on the host until its backward pass, the weights among it. There
all of it is taken to be back at once, beside what others hold of the same: operators fetch it one
by one, as copies, and so it is hardly ever more.
Moments that can be the fullest: each module's recompute, at its end and where a selective one is
the fullest, and each turn from forward to backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from recompute_scan.rehearsal import Rehearsal

# What happens to each module: one of the four.
Choices = npt.NDArray[np.int8]
KEEP, RECOMPUTE, SELECTIVE, OFFLOAD = 0, 1, 2, 3
# A module, by its place, and what happens to it.
Condition = tuple[int, int]


class Moment(Struct, frozen=True):
    """What is held at one moment.

    Attributes:
        always: Bytes, whatever is recomputed.
        terms: Bytes by the conditions of which one has to hold.
    """

    always: int
    terms: tuple[tuple[frozenset[Condition], int], ...]

    def held(self, choices: Choices) -> int:
        """Bytes with these choices."""
        return self.always + sum(
            size
            for literals, size in self.terms
            if any(choices[place] == choice for place, choice in literals)
        )


def moments(
    ranks: Sequence[Rehearsal], fixed: frozenset[int], choices: frozenset[int]
) -> tuple[Moment, ...]:
    """The different ones of all ranks; of those that hold the same, the fullest.

    Args:
        ranks: What each rank has shown.
        fixed: Modules that are kept whatever is chosen.
        choices: What can be chosen for any other.
    """
    found: dict[tuple[tuple[frozenset[Condition], int], ...], int] = {}
    for rehearsal in ranks:
        for moment in _moments_of(rehearsal, fixed, choices):
            found[moment.terms] = max(found.get(moment.terms, 0), moment.always)
    return tuple(Moment(always, terms) for terms, always in found.items())


def _moments_of(
    rehearsal: Rehearsal, fixed: frozenset[int], choices: frozenset[int]
) -> Iterator[Moment]:
    runs = rehearsal.runs
    within = _within_runs(rehearsal)
    ends = sorted({hold.end for storage in rehearsal.storages for hold in storage.holds})
    begins = sorted({hold.begin for storage in rehearsal.storages for hold in storage.holds})
    turns = {end for end in ends if _turns(end, begins, ends)}
    at: list[tuple[int, int, int]] = [(turn, -1, -1) for turn in sorted(turns)]
    at += [
        (run.backward, place, until)
        for place, run in enumerate(runs)
        if run.backward >= 0 and run.candidate not in fixed
        for until in (within[place] if SELECTIVE in choices else within[place][-1:])
    ]
    for time, recomputing, until in at:
        yield _moment(rehearsal, time, recomputing, until, fixed, choices)


def _turns(end: int, begins: Sequence[int], ends: Sequence[int]) -> bool:
    """Is this the first end behind a beginning?"""
    last_begin = begins[np.searchsorted(begins, end) - 1] if begins and begins[0] < end else -1
    place = int(np.searchsorted(ends, end))
    return last_begin >= 0 and (place == 0 or ends[place - 1] < last_begin)


def _within_runs(rehearsal: Rehearsal) -> list[list[int]]:
    """How far the recompute of each run has come where most is there: at its end, and before it
    where a selective checkpoint still holds results that the recompute drops later.
    """
    events: list[list[tuple[int, int, int]]] = [[] for _ in rehearsal.runs]
    for storage in rehearsal.storages:
        for run in {hold.run for hold in storage.holds if hold.run >= 0}:
            mine = [hold for hold in storage.holds if hold.run == run]
            saved = min((one.begin for one in mine if one.kind == "saved"), default=-1)
            heavy = max((one.begin for one in mine if one.kind == "heavy"), default=-1)
            if saved >= 0 or heavy >= 0:
                events[run].append((storage.size, saved, heavy))
    found = []
    for each in events:
        ends = sorted(made for _, made, _ in each if made >= 0)
        held = [
            sum(size for size, made, kept in each if 0 <= made <= end or kept > end) for end in ends
        ]
        last = ends[-1:] or [-1]
        fullest = [ends[held.index(max(held))]] if held and max(held) > held[-1] else []
        found.append([*fullest, *last])
    return found


def _moment(
    rehearsal: Rehearsal,
    time: int,
    recomputing: int,
    until: int,
    fixed: frozenset[int],
    choices: frozenset[int],
) -> Moment:
    """Just before an event.

    Args:
        rehearsal: What was seen.
        time: The event.
        recomputing: The run that is recomputed now, if one is at all.
        until: How far it has come: the event of its forward that was made again last.
        fixed: What cannot be recomputed.
        choices: What can be chosen for any other.
    """
    runs = rehearsal.runs
    again = choices & {RECOMPUTE, SELECTIVE}
    always = 0
    terms: dict[frozenset[Condition], int] = defaultdict(int)
    copies = 0
    if recomputing >= 0 and OFFLOAD in choices:
        copies = rehearsal.candidates[runs[recomputing].candidate].weight_bytes
    for storage in rehearsal.storages:
        literals: set[Condition] = set()
        held = False
        own = elsewhere = False
        for hold in storage.holds:
            place = runs[hold.run].candidate if hold.run >= 0 else -1
            movable = place >= 0 and place not in fixed
            if hold.kind == "saved":
                there = hold.begin < time <= hold.end
                own |= hold.run == recomputing
                elsewhere |= there and hold.run != recomputing
                if not movable:
                    held |= there
                elif (
                    hold.run == recomputing
                    and runs[hold.run].backward <= hold.end
                    and hold.begin <= until
                ):
                    held = True  # made again by now, or kept all the time
                elif there:
                    literals.add((place, KEEP))
            elif not movable or not hold.begin < time <= runs[hold.run].backward:
                continue
            elif hold.kind == "input":
                literals |= {(place, choice) for choice in again}
            elif SELECTIVE in choices and (hold.run != recomputing or hold.begin > until):
                literals.add((place, SELECTIVE))
        copies += storage.size * (own and elsewhere)
        every = ({(place, one) for one in choices} for place, _ in literals)
        if held or any(each <= literals for each in every):
            always += storage.size
        elif literals:
            terms[frozenset(literals)] += storage.size
    if copies and OFFLOAD in choices and recomputing >= 0:
        terms[frozenset({(runs[recomputing].candidate, OFFLOAD)})] += copies
    return Moment(always, tuple(sorted(terms.items(), key=lambda term: sorted(term[0]))))
