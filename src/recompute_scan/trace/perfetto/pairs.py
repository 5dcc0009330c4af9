"""Slices: where one begins, and where it ends.

A track's slices nest, and an end closes the one that was opened last. The writer in torch
(``torch/csrc/profiler/cupti/monitor_pftrace.cpp``) puts the beginnings of many slices first and
then their ends in the same order, not in that of time: read by time alone, neighbours that touch
would lose their ends to each other. So where a file is written like that, the order counts.
"""

from __future__ import annotations

import numpy as np

from recompute_scan.trace.columns import Bool, Int64

OPEN = -(2**63)


def pair(track: Int64, time: Int64, begins: Bool) -> Int64:
    """When each slice that begins here ends, :data:`OPEN` for one that does not.

    Args:
        track: Of each beginning and end, in the order of the file.
        time: ns.
        begins: Which are beginnings.

    Returns:
        One entry for each beginning.
    """
    if not len(track):
        return np.zeros(0, np.int64)
    order = np.argsort(track, kind="stable")
    same = track[order][1:] == track[order][:-1]
    if (same & (np.diff(time[order]) < 0)).any():
        ends = _in_blocks(track, time, begins)
        if ends is not None:
            return ends
    return _by_time(track, time, begins)


def _in_blocks(track: Int64, time: Int64, begins: Bool) -> Int64 | None:
    """Ends of slices written in blocks; ``None`` where they are not. The last may be cut."""
    borders = np.flatnonzero(begins[1:] != begins[:-1]) + 1
    lengths = np.diff(np.concatenate([[0], borders, [len(begins)]]))
    if not begins[0]:
        return None
    opened, closed = lengths[::2], lengths[1::2]
    if len(closed) < len(opened):
        closed = np.append(closed, 0)
    if (opened[:-1] != closed[:-1]).any() or closed[-1] > opened[-1]:
        return None
    started, ended = np.flatnonzero(begins), np.flatnonzero(~begins)
    closes = started[: len(ended)]
    if (track[closes] != track[ended]).any() or (time[ended] < time[closes]).any():
        return None
    found = np.full(len(started), OPEN, np.int64)
    found[: len(ended)] = time[ended]
    return found


def _by_time(track: Int64, time: Int64, begins: Bool) -> Int64:
    number = np.cumsum(begins) - 1
    found = np.full(int(begins.sum()), OPEN, np.int64)
    stack: list[int] = []
    last = None
    order = np.lexsort((time, track))
    for each, at, opens, row in zip(
        track[order].tolist(),
        time[order].tolist(),
        begins[order].tolist(),
        number[order].tolist(),
        strict=True,
    ):
        if each != last:
            stack, last = [], each
        if opens:
            stack.append(row)
        elif stack:
            found[stack.pop()] = at
    return found
