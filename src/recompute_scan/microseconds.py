"""Calls whose times are whole microseconds, told apart again.

Up to torch 2.3 a trace has no finer times: on a fast host a quarter of the calls last 0 µs, and
a third begin together. By time alone a call stands for certain in another one that begins before
it and ends in a later microsecond than it begins in. Where one ends in the very microsecond in
which the next begins, two more things are known:

* The order in which calls began. torch writes the operators and ranges of a thread in that order
  since 1.12, and before in the order in which they ended, which is the same backwards
  (``RecordQueue::getRecords`` in ``torch/csrc/profiler/collection.cpp``).
* How calls of these names nest everywhere else in the same trace, where times do tell.

What neither tells is counted, so that nobody takes it for sure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recompute_scan.trace.columns import Bool, Int32, Int64

US = 1000
# No host begins more calls in one microsecond; where a trace says so, times are not the calls'.
_MOST_AT_ONCE = 64
# Rows that are looked at for how names nest, in stretches that lie all over the trace.
_EVIDENCE, _STRETCH = 1 << 19, 1 << 13
# Names that nest in some places and not in others, by more than this share, tell nothing.
_SPLIT = 0.1


def are_whole(start: Int64, duration: Int64) -> bool:
    """Do all these times, in ns, lie whole microseconds apart?"""
    return len(start) > 0 and all(
        not ((start[part] - start[0]) % US).any() and not (duration[part] % US).any()
        for part in (slice(0, _STRETCH), slice(_STRETCH, None))
    )


def tell_apart(
    name: Int32, thread: Int32, start: Int64, end: Int64, parent: Int32
) -> tuple[Int64, Int64, int]:
    """Start and end of each call, moved within its microsecond so that calls nest as they ran.

    Args:
        name: Code of each call's name.
        thread: Whose each call is.
        start: When each begins, ns; calls in order of (thread, start, beginning).
        end: When each ends; none crosses another.
        parent: The innermost call that holds each for certain; -1 for none.

    Returns:
        Start, end, and how many calls stand where they do by a guess.
    """
    calls = _Calls(name, thread, start, end)
    # What was told apart once shows in what surroundings names nest, which tells the rest.
    told, _ = _told(calls, parent, _Habits(calls, parent))
    told, guessed = _told(calls, parent, _Habits(calls, told))
    return *_spread(calls, told), guessed


class _Calls:
    """The calls, and how many of their thread began in the same microsecond before each."""

    def __init__(self, name: Int32, thread: Int32, start: Int64, end: Int64) -> None:
        self.name = name
        self.start = start
        self.end = end
        first = np.ones(len(start), np.bool_)
        first[1:] = thread[1:] != thread[:-1]
        self.alone = first.copy()  # the first call of its thread
        first[1:] |= start[1:] != start[:-1]
        edges = np.flatnonzero(first)
        together = np.diff(edges, append=len(start))
        self.together = np.repeat(together, together)
        self.place = np.arange(len(start)) - np.repeat(edges, together)


class _Habits:
    """How often a call was seen to hold the next one or to be over, by names.

    Looked up with what it held last, and where that was never seen, without.
    """

    def __init__(self, calls: _Calls, parent: Int32) -> None:
        # What a call that held nothing yet held last.
        self.nothing = int(calls.name.max(initial=0)) + 1
        above, before, below, held = _seen(calls, parent, self.nothing)
        self._tables = [
            _Table(self._key(above, before, below), held),
            _Table(self._key(above, below), held),
            _Table(above, held),
        ]

    def __call__(self, above: Int64, before: Int64, below: Int64) -> tuple[Bool, Bool]:
        """Does a call hold the next one; and is that a guess?"""
        holds, over = self._tables[0][self._key(above, before, below)]
        for table, key in zip(self._tables[1:], (self._key(above, below), above), strict=True):
            unknown = np.flatnonzero(holds + over == 0)
            if len(unknown):
                holds[unknown], over[unknown] = table[key[unknown]]
        return holds > over, np.minimum(holds, over) >= _SPLIT * (holds + over)

    def _key(self, *names: Int64) -> Int64:
        key = np.zeros(len(names[0]), np.int64)
        for name in names:
            key = key * (self.nothing + 1) + name
        return key


class _Table:
    """How often each key was seen with ``True`` and with ``False``."""

    def __init__(self, keys: Int64, seen: Bool) -> None:
        self._keys, at = np.unique(keys, return_inverse=True)
        every = np.bincount(at, minlength=len(self._keys) + 1)
        self._yes = np.bincount(at[seen], minlength=len(self._keys) + 1)
        self._no = every - self._yes

    def __getitem__(self, keys: Int64) -> tuple[Int64, Int64]:
        at = np.searchsorted(self._keys, keys)
        at[np.append(self._keys, -1)[at] != keys] = len(self._keys)
        return self._yes[at], self._no[at]


def _seen(calls: _Calls, parent: Int32, nothing: int) -> tuple[Int64, Int64, Int64, Bool]:
    """Names of a call that was open, of what it held last, of the next call; was that in it?"""
    row = np.flatnonzero(~calls.alone)
    if len(row) > _EVIDENCE:
        row = row[row // _STRETCH % -(-len(row) // _EVIDENCE) == 0]
    open_one, before = row - 1, np.full(len(row), nothing)
    found = []
    while len(row):
        held = open_one == parent[row]
        known = (calls.end[open_one] != calls.start[row]) | (calls.end[row] != calls.start[row])
        names = calls.name[open_one], before, calls.name[row], held
        found.append([column[known] for column in names])
        on = ~held & (parent[open_one] >= 0)
        row, open_one = row[on], open_one[on]
        open_one, before = parent[open_one], calls.name[open_one]
    above, before, below, inside = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return above, before, below, inside


def _told(calls: _Calls, certain: Int32, habits: _Habits) -> tuple[Int32, int]:
    """The parent of each call, and how many of them are guesses."""
    parent = certain.copy()
    row = np.flatnonzero(~calls.alone & (calls.end == calls.start))
    row = row[certain[row] != row - 1]
    many = calls.place[row] >= _MOST_AT_ONCE
    guessed = np.zeros(len(certain), np.bool_)
    guessed[row[many]] = True
    row = row[~many]
    place = calls.place[row]
    for which in range(int(place.max(initial=-1)) + 1):
        _settle(calls, parent, row[place == which], habits, guessed)
    return parent, int(guessed.sum())


def _settle(
    calls: _Calls, parent: Int32, row: Int64, habits: _Habits, guessed: Bool
) -> None:
    """The parents of calls whose forerunners' parents are known, in place."""
    certain = parent[row]
    open_one, before = row - 1, np.full(len(row), habits.nothing)
    while len(row):
        on = open_one != certain
        row, certain, open_one, before = row[on], certain[on], open_one[on], before[on]
        at = np.flatnonzero(calls.end[open_one] == calls.start[row])
        holds, guess = habits(calls.name[open_one[at]], before[at], calls.name[row[at]])
        guessed[row[at[guess]]] = True
        parent[row[at[holds]]] = open_one[at[holds]]
        on = np.ones(len(row), np.bool_)
        on[at[holds]] = False
        row, certain, open_one = row[on], certain[on], open_one[on]
        open_one, before = parent[open_one], calls.name[open_one]


def _spread(calls: _Calls, parent: Int32) -> tuple[Int64, Int64]:
    """Times within the microsecond: n calls that begin in one, and its end, lie equally far apart."""
    slot = US // (calls.together + 1)
    start, end = calls.start + slot * calls.place, calls.end.copy()
    # Whichever call is over when the next one of the thread begins: it ended before that, or,
    # where that is in another microsecond, after all that began in its own.
    row = np.arange(1, len(start) + 1)
    last = np.append(calls.alone[1:], True)
    open_one, until = row - 1, np.where(last, -1, np.append(parent[1:], -1))
    while len(row):
        on = open_one != until
        row, open_one, until = row[on], open_one[on], until[on]
        before = row - 1
        within = calls.end[open_one] == calls.start[before]
        end[open_one[within]] += (slot * calls.together)[before[within]]
        follows = np.flatnonzero(~last[before])
        follows = follows[calls.end[open_one[follows]] == calls.start[row[follows]]]
        end[open_one[follows]] = start[row[follows]]
        open_one = parent[open_one]
    return start, end
