"""Which intervals lie within which, where times are exact and where they are rounded.

torch writes the operators and ranges of a thread in the order in which they began
(``RecordQueue::getRecords`` in ``torch/csrc/profiler/collection.cpp``, since 1.12), and before
that in the order in which they ended, which is the same backwards. The runtime's calls follow by
themselves. A file that went through another program may have lost that order; one that was sorted
by time looks as if it had it, but for what calls there follow each other.

Up to torch 2.3 times are whole microseconds: on a fast host a quarter of the calls last 0 µs, and a
third begin together. By time alone a call is certainly inside another one that begins before it and
ends in a later microsecond than it begins in. Where one ends in the very microsecond in which the
next begins, two more things are known: the order in which they began, and how calls of these names
nest elsewhere in the trace, where times are clear. A call that neither decides is counted as a
guess.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from recompute_scan.trace.columns import Bool, Int16, Int32, Int64, Ints, Kind, Trace

# Times written as absolute float microseconds are off by up to a quarter of one.
_SLACK_NS = 1000
# Intervals taken at once: what is needed on the way to a result is held for so many only.
_PIECE = 1 << 18
# Deeper calls stand at this depth: every level costs a round, and no program nests so deep
# (Python's limit of recursion is 1,000).
_DEEPEST = 1000


def nest_intervals(thread: Int32, start: Int64, end: Int64) -> tuple[Int16, Int32, Int32, int]:
    """Depth, row of the parent (-1: none), number of rows below, and how many had to be cut.

    An interval's parent is the innermost of its thread that holds it, down to a depth of 1,000.
    Crossing ones are cut in place until they nest.

    Args:
        thread: Whose each interval is.
        start: When each begins, ns; in order of (thread, start, longest first).
        end: When each ends, ns; written to.
    """
    depth = np.zeros(len(start), np.int16)
    parent = np.full(len(start), -1, np.int32)
    size = np.zeros(len(start), np.int32)
    overruns = 0
    for piece in _pieces(thread, start, end):
        depth[piece], above, levels, cut = _nest_together(start[piece], end[piece])
        parent[piece] = np.where(above >= 0, above + piece.start, -1)
        overruns += cut
        below = size[piece]
        for rows in reversed(levels[1:]):
            np.add.at(below, above[rows], below[rows] + 1)
    return depth, parent, size, overruns


def _pieces(thread: Int32, start: Int64, end: Int64) -> Iterator[slice]:
    """Groups of intervals of one thread, where no interval reaches into another group."""
    edges = np.flatnonzero(thread[1:] != thread[:-1]) + 1
    for first, last in itertools.pairwise((0, *edges.tolist(), len(thread))):
        alone = np.ones(last - first, np.bool_)
        alone[1:] = start[first + 1 : last] >= np.maximum.accumulate(end[first : last - 1])
        for piece in whole_trees(alone):
            yield slice(piece.start + first, piece.stop + first)


def whole_trees(first: Bool) -> Iterator[slice]:
    """Groups that begin where ``first`` is true, of about a piece's size if that can be."""
    begin = 0
    while begin < len(first):
        end = min(begin + _PIECE, len(first))
        while end < len(first) and not first[end : end + _PIECE].any():
            end = min(end + _PIECE, len(first))
        if end < len(first):
            end += int(first[end : end + _PIECE].argmax())
        yield slice(begin, end)
        begin = end


def _nest_together(start: Int64, end: Int64) -> tuple[Int16, Int64, tuple[Int64, ...], int]:
    """Depth and parent of each interval of a few trees, and the rows of each depth.

    ``end`` is cut in place to nest; last comes how many were.
    """
    depth, parent, levels = _forest(start, end)
    limit = np.where(parent >= 0, end[parent], np.iinfo(np.int64).max)
    if not (end > limit).any():
        return depth, parent, levels, 0
    cut = _cut_to_nest(start, end)
    return *_forest(start, end), cut


def _forest(start: Int64, end: Int64) -> tuple[Int16, Int64, tuple[Int64, ...]]:
    depth = _depths(start, end)
    levels = levels_of(depth)
    parent = np.full(len(depth), -1, np.int64)
    for above, rows in itertools.pairwise(levels):
        if len(above):
            parent[rows] = above[above.searchsorted(rows) - 1]
    return depth, parent, levels


def _cut_to_nest(start: Int64, end: Int64) -> int:
    """Cut crossing intervals of one thread in place; how many were cut.

    A call that outlives the one it began in ends with it, unless it began within the slack of
    that one's end: then they are neighbors with overlapping rounded times, and the first is cut.
    """
    cut = 0
    begins, ends = start.tolist(), end.tolist()
    still_open: list[int] = []
    for row, begin in enumerate(begins):
        while still_open and ends[still_open[-1]] <= begin:
            still_open.pop()
        while still_open and ends[still_open[-1]] < ends[row]:
            above = still_open[-1]
            shared = ends[above] - begin
            cut += 1
            if begins[above] < begin and shared <= min(_SLACK_NS, ends[row] - ends[above]):
                ends[above] = begin
                still_open.pop()
            else:
                ends[row] = ends[above]
        still_open.append(row)
    end[:] = ends
    return cut


def _depths(start: Int64, end: Int64) -> Int16:
    rows = np.arange(len(start))
    # Ends are almost in order, which a stable sort takes an eighth of the time for.
    closed = np.searchsorted(np.sort(end, kind="stable"), start, side="right")
    empty = end == start
    if empty.any():
        # A call without duration holds nothing, and closes after calls of the same instant before
        # it, not after those behind it: those are counted in `closed` and must come off.
        empty_before = np.concatenate(([0], empty.cumsum()))
        behind = start.searchsorted(start, side="right")
        closed -= empty_before[behind] - empty_before[rows]
    # NumPy sorts 16 bits by counting them, four times faster than what is longer.
    depth: Int16 = np.minimum(rows - closed, _DEEPEST).astype(np.int16)
    return depth


def levels_of(depth: Int16, first: int = 0) -> tuple[Int64, ...]:
    """Rows of each depth, in order, of calls that begin at row ``first``."""
    by_depth = depth.argsort(kind="stable")
    depths = np.arange(1, (int(depth.max()) if len(depth) else 0) + 1)
    edges = depth[by_depth].searchsorted(depths).tolist()
    rows = by_depth + first
    return tuple(rows[a:b] for a, b in itertools.pairwise((0, *edges, len(rows))))


# Rows that are looked at, in chunks that lie all over the trace.
_ENOUGH, CHUNK = 1 << 18, 1 << 13
# Rows that may stand out of order before the file counts as in another one. Measured: none in
# torch's files, half of them where events were shuffled.
_ASTRAY = 0.01
# Pairs of calls that begin together and otherwise only ever follow each other the other way
# round. Measured: 0 of 10^5 in torch's order; 3 % to 60 % in any other.
_ODD = 0.01


def in_order(trace: Trace, rows: Int32) -> tuple[Int32, bool, bool]:
    """These events in the order in which the calls of each thread began, as far as is known.

    Returns:
        The rows in order; whether that is the order in which they ended, the last first; and
        whether the calls began in that order at equal times too, as far as the file shows.
    """
    start, end, thread = trace.ts[rows], trace.ts[rows] + trace.dur[rows], trace.thread[rows]
    # The runtime's calls come after what may hold them.
    runtime = trace.kind[rows] == Kind.RUNTIME
    written = np.flatnonzero(~runtime)
    written = written[thread[written].argsort(kind="stable")]
    backwards = not _ascends(start[written], thread[written])
    if backwards and not _ascends(end[written], thread[written]):
        return rows[np.lexsort((start - end, start, thread))], False, False
    if backwards:
        rows, runtime, thread = rows[::-1], runtime[::-1], thread[::-1]
        start, end = -end[::-1], -start[::-1]
    order = np.lexsort((runtime, start, thread))
    own = order[~runtime[order]]
    if _odd(trace.name[rows[own]], start[own], end[own], thread[own]):
        return rows[np.lexsort((start - end, start, thread))], backwards, False
    return rows[order], backwards, True


def _ascends(times: Int64, thread: Int32) -> bool:
    astray = (times[1:] < times[:-1]) & (thread[1:] == thread[:-1])
    return int(astray.sum()) <= _ASTRAY * len(times)


def _odd(name: Int32, start: Int64, end: Int64, thread: Int32) -> bool:
    """Does more follow at equal times than can: longer calls, or names that never do elsewhere?

    What lasts into another microsecond holds whatever begins behind it in its first.
    """
    lasting = np.flatnonzero(end > start)
    above, below = lasting[:-1], lasting[1:]
    longer = (thread[above] == thread[below]) & (start[above] == start[below])
    longer &= end[above] < end[below]
    if longer.sum() > _ODD * max(1, len(lasting)):
        return True
    row = some_of(np.flatnonzero(thread[1:] == thread[:-1]) + 1)
    above, below = name[row - 1].astype(np.int64), name[row].astype(np.int64)
    size = int(name.max(initial=0)) + 1
    together = start[row] == start[row - 1]
    seen = Votes((above * size + below)[~together], together[~together])
    above, below = above[together], below[together]
    (_, so), (_, otherwise) = seen[above * size + below], seen[below * size + above]
    return int(((so == 0) & (otherwise > 0)).sum()) > _ODD * len(above)


def some_of(rows: Int64) -> Int64:
    """As many of these rows as are enough to learn from, from everywhere."""
    every = -(-len(rows) // _ENOUGH)
    return rows[rows // CHUNK % every == 0] if every > 1 else rows


class Votes:
    """How often each of some keys came with yes, and how often with no."""

    def __init__(self, keys: Int64, yes: Bool) -> None:
        known, at = np.unique(keys, return_inverse=True)
        # One more, that no key is at, for those that never came.
        self._keys = np.append(known, -1)
        self._yes = np.bincount(at[yes], minlength=len(self._keys))
        self._no = np.bincount(at[~yes], minlength=len(self._keys))

    def __getitem__(self, keys: Int64) -> tuple[Int64, Int64]:
        """How often each of these came with yes, and with no."""
        at = np.searchsorted(self._keys[:-1], keys)
        at[self._keys[at] != keys] = len(self._keys) - 1
        return self._yes[at], self._no[at]


US = 1000
# No host begins more calls in one microsecond; where a trace says so, times are not the calls'.
_MOST_AT_ONCE = 64
# Names that nest in some places and not in others, by more than this share, decide nothing.
_SPLIT = 0.1


def are_whole(trace: Trace, rows: Int32) -> bool:
    """Do all times of these events lie whole microseconds apart?"""
    first = trace.ts[rows[:1]]
    return len(rows) > 0 and all(
        not ((trace.ts[part] - first) % US).any() and not (trace.dur[part] % US).any()
        for part in (rows[:CHUNK], rows[CHUNK:])
    )


def tell_apart(trace: Trace, rows: Int32) -> tuple[Int32, Int64, Int64, int, int]:
    """The calls of these events, with times by which they nest as they ran.

    Returns:
        Row of each call's event in the trace, in order of (thread, start); when each begins and
        ends, ns, moved by less than a microsecond; how many had to be cut because they crossed
        another; and how many stand where they do by a guess.
    """
    events, backwards, known = in_order(trace, rows)
    name, thread = trace.name[events], trace.thread[events]
    start, end = trace.ts[events], trace.ts[events] + trace.dur[events]
    if backwards:
        start, end = -end, -start
    _, parent, _, overruns = nest_intervals(thread, start, end)
    calls = _Calls(name, thread, start, end)
    # The first round shows in which surroundings names nest, which decides the rest.
    parents, _ = _decided(calls, parent, parent)
    parents, guessed = _decided(calls, parent, parents)
    start, end = _spread(calls, parents)
    if not known:
        guessed |= calls.together > 1
    if backwards:
        start, end = -end, -start
        order = np.lexsort((-end, start, thread))
        events, start, end = events[order], start[order], end[order]
    return events, start, end, overruns, int(guessed.sum())


class _Calls:
    """The calls in order of (thread, start, beginning), without crossings.

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
        # Stands for the last call in one that held nothing yet.
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
    """Names of an open call, of the last call in it and of the next; was the next in it?"""
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


def _decided(calls: _Calls, certain: Int32, parent: Int32) -> tuple[Int32, Bool]:
    """The parent of each call, and whether it is a guess.

    ``certain`` is the innermost call that holds each for certain, -1 for none; ``parent`` what is
    known so far.
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
    """The parents of some calls, where all calls before them have theirs; and guesses."""
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
