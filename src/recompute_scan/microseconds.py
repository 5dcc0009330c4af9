"""Calls whose times are whole microseconds, told apart again.

Up to torch 2.3 a trace has no finer times: on a fast host a quarter of the calls last 0 µs, and
a third begin together. By time alone a call stands for certain in another one that begins before
it and ends in a later microsecond than it begins in. Where one ends in the very microsecond in
which the next begins, two more things are known: in which order they began
(:mod:`recompute_scan.nesting`), and how calls of these names nest everywhere else in the same
trace, where times do tell. What neither tells is counted, so that nobody takes it for sure.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from recompute_scan.nesting import CHUNK, Votes, in_order, nest_intervals, some_of
from recompute_scan.trace.columns import Bool, Int32, Int64, Ints, Trace

US = 1000
# No host begins more calls in one microsecond; where a trace says so, times are not the calls'.
_MOST_AT_ONCE = 64
# Names that nest in some places and not in others, by more than this share, tell nothing.
_SPLIT = 0.1


def are_whole(trace: Trace, rows: Int32) -> bool:
    """Do all times of these events lie whole microseconds apart?"""
    first = trace.ts[rows[:1]]
    return len(rows) > 0 and all(
        not ((trace.ts[part] - first) % US).any() and not (trace.dur[part] % US).any()
        for part in (rows[:CHUNK], rows[CHUNK:])
    )


class Apart(Struct, frozen=True):
    """Calls with times that tell them apart.

    Attributes:
        events: Row of each call's event in the trace, in order of (thread, start).
        start: When each begins, ns, moved by less than a microsecond.
        end: When each ends.
        overruns: How many had to be cut because they crossed another.
        guessed: How many stand where they do by a guess.
    """

    events: Int32
    start: Int64
    end: Int64
    overruns: int
    guessed: int


def tell_apart(trace: Trace, rows: Int32) -> Apart:
    """The calls of these events, with times by which they nest as they ran."""
    events, backwards, known = in_order(trace, rows)
    name, thread = trace.name[events], trace.thread[events]
    start, end = trace.ts[events], trace.ts[events] + trace.dur[events]
    if backwards:
        start, end = -end, -start
    _, parent, _, overruns = nest_intervals(thread, start, end)
    calls = _Calls(name, thread, start, end)
    # What was told apart once shows in what surroundings names nest, which tells the rest.
    told, _ = _told(calls, parent, parent)
    told, guessed = _told(calls, parent, told)
    start, end = _spread(calls, told)
    if not known:
        guessed |= calls.together > 1
    if backwards:
        start, end = -end, -start
        order = np.lexsort((-end, start, thread))
        events, start, end = events[order], start[order], end[order]
    return Apart(events, start, end, overruns, int(guessed.sum()))


class _Calls:
    """The calls in order of (thread, start, beginning), none of which crosses another.

    Attributes:
        first: Is a call the first of its thread?
        together: How many of its thread begin in the same microsecond, itself among them.
        place: How many of those begin before it.
    """

    def __init__(self, name: Int32, thread: Int32, start: Int64, end: Int64) -> None:
        self.name = name
        self.start = start
        self.end = end
        self.first = np.ones(len(start), np.bool_)
        self.first[1:] = thread[1:] != thread[:-1]
        later = self.first.copy()
        later[1:] |= start[1:] != start[:-1]
        edges = np.flatnonzero(later).astype(np.int32)
        together = np.diff(edges, append=np.int32(len(start)))
        self.together = together.repeat(together)
        self.place = np.arange(len(start), dtype=np.int32) - edges.repeat(together)


class _Habits:
    """How often a call was seen to hold the next one or to be over by then, by names.

    Looked up with what the call held last; where that was never seen, without; and where that
    was not either, by the call's own name alone.
    """

    def __init__(self, calls: _Calls, parent: Int32) -> None:
        # What a call that held nothing yet held last.
        self.nothing = int(calls.name.max(initial=0)) + 1
        above, before, below, held = _seen(calls, parent, self.nothing)
        self._tables = [
            Votes(self._key(above, before, below), held),
            Votes(self._key(above, below), held),
            Votes(above, held),
        ]

    def __call__(self, above: Ints, before: Ints, below: Ints) -> tuple[Bool, Bool]:
        """Does a call hold the next one; and is that a guess?"""
        held, over = self._tables[0][self._key(above, before, below)]
        for table, key in zip(self._tables[1:], (self._key(above, below), above), strict=True):
            unseen = np.flatnonzero(held + over == 0)
            if len(unseen):
                held[unseen], over[unseen] = table[key[unseen]]
        return held > over, np.minimum(held, over) >= _SPLIT * (held + over)

    def _key(self, *names: Ints) -> Int64:
        key = np.zeros(len(names[0]), np.int64)
        for name in names:
            key = key * (self.nothing + 1) + name
        return key


def _seen(calls: _Calls, parent: Int32, nothing: int) -> tuple[Int64, Int64, Int64, Bool]:
    """Names of a call that was open, of what it held last, of the next call; was that in it?"""
    row = some_of(np.flatnonzero(~calls.first))
    one: Ints = row - 1
    before: Ints = np.full(len(row), nothing)
    found = []
    while True:
        held = one == parent[row]
        known = (calls.end[one] != calls.start[row]) | (calls.end[row] != calls.start[row])
        seen = calls.name[one], before, calls.name[row], held
        found.append([column[known] for column in seen])
        on = np.flatnonzero(~held & (parent[one] >= 0))
        if not len(on):
            break
        row, one = row[on], one[on]
        one, before = parent[one], calls.name[one]
    above, before, below, held = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return above, before, below, held


def _told(calls: _Calls, certain: Int32, parent: Int32) -> tuple[Int32, Bool]:
    """The parent of each call, and whether it is a guess.

    Args:
        calls: The calls.
        certain: The innermost call that holds each for certain; -1 for none.
        parent: The parents as far as they are told.
    """
    habits = _Habits(calls, parent)
    parent = parent.copy()
    guessed = np.zeros(len(certain), np.bool_)
    # One that lasts into another microsecond is in none that ends before.
    row = np.flatnonzero(~calls.first & (calls.end == calls.start))
    row = row[certain[row] != row - 1]
    place = calls.place[row]
    guessed[row[place >= _MOST_AT_ONCE]] = True
    for which in range(min(int(place.max(initial=-1)) + 1, _MOST_AT_ONCE)):
        now = row[place == which]
        parent[now], guessed[now] = _settled(calls, parent, now, certain[now], habits)
    return parent, guessed


def _settled(
    calls: _Calls, parent: Int32, row: Int64, certain: Int32, habits: _Habits
) -> tuple[Int32, Bool]:
    """The parents of some calls, where those of all calls before them are told; and guesses."""
    found, guessed = certain.copy(), np.zeros(len(row), np.bool_)
    which = np.arange(len(row))
    one: Ints = row - 1
    before: Ints = np.full(len(row), habits.nothing)
    while len(row):
        at = np.flatnonzero(calls.end[one] == calls.start[row])
        holds, guess = habits(calls.name[one[at]], before[at], calls.name[row[at]])
        guessed[which[at[guess]]] = True
        found[which[at[holds]]] = one[at[holds]]
        on = parent[one] != certain[which]
        on[at[holds]] = False
        row, which, one = row[on], which[on], one[on]
        one, before = parent[one], calls.name[one]
    return found, guessed


def _spread(calls: _Calls, parent: Int32) -> tuple[Int64, Int64]:
    """Times within a microsecond: the calls that begin in it and its end lie equally far apart."""
    slot: Int32 = US // (calls.together + 1)
    start, end = calls.start + slot * calls.place, calls.end.copy()
    # Which calls are over when the next one of the thread begins? They ended before that; or,
    # where that is in another microsecond, after all that began in their last one.
    row = np.arange(1, len(start) + 1, dtype=np.int32)
    last = np.append(calls.first[1:], True)
    one: Ints = row - 1
    until: Ints = np.append(parent[1:], np.int32(-1))
    until[last] = -1
    while len(row):
        on = np.flatnonzero(one != until)
        row, one, until = row[on], one[on], until[on]
        before = row - 1
        within = np.flatnonzero(calls.end[one] == calls.start[before])
        end[one[within]] += (slot * calls.together)[before[within]]
        follows = np.flatnonzero(~last[before])
        follows = follows[calls.end[one[follows]] == calls.start[row[follows]]]
        end[one[follows]] = start[row[follows]]
        one = parent[one]
    return start, end
