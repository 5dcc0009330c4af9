"""What every arrangement of checkpoints holds at the moments that can be the fullest.

What is held at a moment is a sum over storages, each counted once however many hold it. An operator
inside a module holds what it saves where the module is not recomputed; a checkpoint holds the
module's inputs, and while its recompute is used everything that the module saves. A selective one
holds the results of heavy operators beside the inputs, each until its recompute has come to it.
What an offloaded module saves is on the host until its backward pass, the weights among it. There
all of it is taken to be back at once, beside what others hold of the same: operators fetch it one
by one, as copies, and so it is hardly ever more.
A part of a module with a checkpoint of its own is one inside a module that is kept.
Moments that can be the fullest: each recompute, of a module or a part, at its end and where a
selective one is the fullest, and each turn from forward to backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from recompute_scan.rehearsal import Rehearsal

# What happens to each module: one of the first four. To a part happens what does to its module, or
# it alone is recomputed.
Choices = npt.NDArray[np.int8]
KEEP, RECOMPUTE, SELECTIVE, OFFLOAD, PART = 0, 1, 2, 3, 4
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
    ranks: Sequence[Rehearsal],
    fixed: frozenset[int],
    choices: frozenset[int],
    parts: frozenset[int] = frozenset(),
) -> tuple[Moment, ...]:
    """The different ones of all ranks; of those that hold the same, the fullest.

    Args:
        ranks: What each rank has shown.
        fixed: Modules that are kept whatever is chosen.
        choices: What can be chosen for any other.
        parts: Places of the parts that can be recomputed alone.
    """
    found: dict[tuple[tuple[frozenset[Condition], int], ...], int] = {}
    for rehearsal in ranks:
        for moment in _moments_of(rehearsal, fixed, choices, parts):
            found[moment.terms] = max(found.get(moment.terms, 0), moment.always)
    return tuple(Moment(always, terms) for terms, always in found.items())


def _moments_of(
    rehearsal: Rehearsal, fixed: frozenset[int], choices: frozenset[int], parts: frozenset[int]
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
        if run.backward >= 0 and run.part_of < 0 and run.candidate not in fixed
        for until in (within[place] if SELECTIVE in choices else within[place][-1:])
    ]
    at += [
        (run.backward, place, run.backward)
        for place, run in enumerate(runs)
        if run.backward >= 0 and run.candidate in parts
    ]
    for time, recomputing, until in at:
        yield _moment(rehearsal, time, recomputing, until, fixed, choices, parts)


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
        whole = [(rehearsal.whole_run(hold.run), hold) for hold in storage.holds]
        for run in {run for run, _ in whole if run >= 0}:
            mine = [hold for known, hold in whole if known == run]
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
    parts: frozenset[int],
) -> Moment:
    """Just before an event.

    Args:
        rehearsal: What was seen.
        time: The event.
        recomputing: The run that is recomputed now, if one is at all.
        until: How far it has come: the event of its forward that was made again last.
        fixed: What cannot be recomputed.
        choices: What can be chosen for any other.
        parts: What else can be recomputed.
    """
    runs = rehearsal.runs
    again = choices & {RECOMPUTE, SELECTIVE}
    backward = runs[recomputing].backward if recomputing >= 0 else -1
    of_part = recomputing >= 0 and runs[recomputing].part_of >= 0
    always = 0
    terms: dict[frozenset[Condition], int] = defaultdict(int)
    copies = 0
    if recomputing >= 0 and not of_part and OFFLOAD in choices:
        copies = rehearsal.candidates[runs[recomputing].candidate].weight_bytes
    for storage in rehearsal.storages:
        literals: set[Condition] = set()
        held = False
        own = elsewhere = False
        for hold in storage.holds:
            run = rehearsal.whole_run(hold.run)
            place = runs[run].candidate if run >= 0 else -1
            # What decides of it: the part, where that has a choice of its own.
            part = runs[hold.run].candidate if hold.run >= 0 else -1
            part = part if part in parts else place
            movable = place >= 0 and place not in fixed
            if hold.kind == "saved":
                there = hold.begin < time <= hold.end
                mine = recomputing in {run, hold.run} - {-1}
                own |= mine
                elsewhere |= there and not mine
                if not movable:
                    held |= there
                elif mine and backward <= hold.end and hold.begin <= until:
                    # Made again by now, or kept all the time.
                    if of_part:
                        literals |= {(part, KEEP), (part, PART)}
                    elif part != place:
                        literals |= {(part, choice) for choice in choices}
                    else:
                        held = True
                elif there:
                    literals.add((part, KEEP))
            elif hold.kind == "input" and hold.run != run:
                if part in parts and movable and hold.begin < time <= runs[hold.run].backward:
                    literals.add((part, PART))
            elif not movable or not hold.begin < time <= runs[run].backward:
                continue
            elif hold.kind == "input":
                literals |= {(place, choice) for choice in again}
            elif SELECTIVE in choices and (run != recomputing or hold.begin > until):
                literals.add((place, SELECTIVE))
        copies += storage.size * (own and elsewhere)
        if held or any(_all_of(place, choices, parts) <= literals for place, _ in literals):
            always += storage.size
        elif literals:
            terms[frozenset(literals)] += storage.size
    if copies and OFFLOAD in choices and recomputing >= 0 and not of_part:
        terms[frozenset({(runs[recomputing].candidate, OFFLOAD)})] += copies
    return Moment(always, tuple(sorted(terms.items(), key=lambda term: sorted(term[0]))))


def _all_of(place: int, choices: frozenset[int], parts: frozenset[int]) -> set[Condition]:
    return {(place, one) for one in (choices | {PART} if place in parts else choices)}
