"""The nearest of many moments before or after a time on a thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recompute_scan.trace.columns import Bool, Int32, Int64


class Moments:
    """Moments of some calls, by thread.

    Args:
        thread: Thread of each call.
        kinds: Which calls, and the moment of each call; several kinds may be given.
    """

    def __init__(self, thread: Int32, kinds: Sequence[tuple[Bool, Int64]]) -> None:
        rows = np.concatenate([np.flatnonzero(among) for among, _ in kinds])
        times = np.concatenate([moment[among] for among, moment in kinds])
        order = np.lexsort((times, thread[rows]))
        rows, times = rows[order], times[order]
        codes, firsts = np.unique(thread[rows], return_index=True)
        stops = [*firsts[1:].tolist(), len(rows)]
        self._times: dict[int, Int64] = {}
        self._rows: dict[int, Int64] = {}
        for code, first, stop in zip(codes.tolist(), firsts.tolist(), stops, strict=True):
            self._times[code], self._rows[code] = times[first:stop], rows[first:stop]

    def last(self, thread: int, time: int, *, otherwise: int) -> tuple[int, int]:
        """The last moment at or before ``time`` and its call's row; ``otherwise`` and -1."""
        if thread not in self._times:
            return otherwise, -1
        at = int(np.searchsorted(self._times[thread], time, side="right")) - 1
        return self._at(thread, at) if at >= 0 else (otherwise, -1)

    def next(self, thread: int, time: int, *, otherwise: int) -> tuple[int, int]:
        """The first moment at or after ``time`` and its call's row; ``otherwise`` and -1."""
        if thread not in self._times:
            return otherwise, -1
        at = int(np.searchsorted(self._times[thread], time, side="left"))
        return self._at(thread, at) if at < len(self._times[thread]) else (otherwise, -1)

    def _at(self, thread: int, place: int) -> tuple[int, int]:
        return int(self._times[thread][place]), int(self._rows[thread][place])
