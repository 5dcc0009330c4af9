"""In which order calls began that a trace lets begin at the same time.

torch writes the operators and ranges of a thread in the order in which they began
(``RecordQueue::getRecords`` in ``torch/csrc/profiler/collection.cpp``, since 1.12), and before
that in the order in which they ended, which is the same backwards. The runtime's calls follow by
themselves. A file that went through another program may have lost that order; one that was sorted
by time looks as if it had it, but for what calls there follow each other.
"""

from __future__ import annotations

import numpy as np

from recompute_scan.tally import Tally
from recompute_scan.trace.columns import Int32, Int64, Kind, Trace

# Rows that are looked at, in stretches that lie all over the trace.
_ENOUGH, STRETCH = 1 << 18, 1 << 13
# Rows that may stand out of order before the file counts as in another one. Measured: none in
# torch's files, half of them where events were shuffled.
_ASTRAY = 0.01
# Pairs of calls that begin together and otherwise only ever follow each other the other way
# round. Measured: none of 10^5 in torch's order; 3 % to 60 % in any other.
_ODD = 0.01


def in_order(trace: Trace, rows: Int32) -> tuple[Int32, bool, bool]:
    """These events in the order in which the calls of each thread began, as far as is known.

    Returns:
        The rows in order; whether that is the order in which they ended, the last first; and
        whether the order at equal times is that of the calls, as far as the file shows.
    """
    start, end, thread = trace.ts[rows], trace.ts[rows] + trace.dur[rows], trace.thread[rows]
    # The runtime's calls come after what may hold them.
    runtime = trace.kind[rows] == Kind.RUNTIME
    written = np.flatnonzero(~runtime)
    written = written[np.argsort(thread[written], kind="stable")]
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
    seen = Tally((above * size + below)[~together], together[~together])
    above, below = above[together], below[together]
    (_, so), (_, otherwise) = seen[above * size + below], seen[below * size + above]
    return int(((so == 0) & (otherwise > 0)).sum()) > _ODD * len(above)


def some_of(rows: Int64) -> Int64:
    """As many of these rows as are enough to learn from, from everywhere."""
    every = -(-len(rows) // _ENOUGH)
    return rows[rows // STRETCH % every == 0] if every > 1 else rows
