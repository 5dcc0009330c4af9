"""Which replayed operators had their results kept, by what keeping leaves in the trace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recompute_scan.model import Calls
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.matching import Replay
from recompute_scan.recompute.structure import OperatorCodes
from recompute_scan.trace.columns import Bool, Int64


class Keeping:
    """Tells which operators of a replay gave up what they save.

    A non-reentrant checkpoint that is replayed keeps each tensor that an operator saves, detached
    inside that operator; not those of operators in a further checkpoint within, which keeps
    nothing but its inputs until it is replayed itself (``torch/utils/checkpoint.py``,
    ``_recomputation_hook``). Operators that save nothing tell nothing.
    """

    def __init__(self, calls: Calls, code: OperatorCodes, replays: Sequence[Replay]) -> None:
        detach = np.array([name == words.DETACH for name in calls.names], np.bool_)[calls.name]
        self._before = np.concatenate(([0], np.cumsum(detach, dtype=np.int32)))
        self._size = calls.size
        again = np.concatenate([*(replay.again for replay in replays), np.zeros(0, np.int64)])
        codes = code[again]
        self._saving = np.zeros(len(calls), np.bool_)
        self._saving[again] = np.isin(codes, codes[self._detaches(again)])

    def forgotten(self, replay: Replay, places: Int64, later: Bool) -> int | None:
        """The last place that a replay gave up for good, ``None`` for none.

        Operators that save nothing share the fate of the one before them.

        Args:
            replay: The replay.
            places: Places of its operators in the forward pass.
            later: For each place: was it replayed after this one?
        """
        saving = self._saving[replay.again]
        lost = np.flatnonzero(saving & ~self._detaches(replay.again) & ~later[places])
        if not len(lost):
            return None
        behind = np.flatnonzero(saving[lost[-1] + 1 :])
        return int(places[lost[-1] + behind[0]] if len(behind) else places[-1])

    def _detaches(self, rows: Int64) -> Bool:
        inside = self._before[rows + self._size[rows] + 1] - self._before[rows + 1]
        return np.asarray(inside > 0)
