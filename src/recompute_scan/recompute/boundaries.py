"""Where checkpointed calls begin and end in the trace."""

from __future__ import annotations

import numpy as np

from recompute_scan.model import Calls
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.roles import OPERATORS
from recompute_scan.recompute.structure import Structure
from recompute_scan.trace.columns import Int64


class Boundaries:
    """Begins and ends of checkpoint functions, and what torch's other variant leaves of its begin.

    The non-reentrant checkpoint leaves an operator from torch 2.1 to 2.12; before and since it
    leaves nothing.
    """

    def __init__(self, calls: Calls, structure: Structure) -> None:
        saver = np.array([name == words.INPUT_SAVER for name in calls.names], np.bool_)
        operator = OPERATORS[structure.role]
        savers = np.flatnonzero(saver[calls.name] & operator)
        functions = np.flatnonzero(structure.function == np.arange(len(calls)))
        rows = np.concatenate([savers, functions, functions + calls.size[functions] + 1])
        engine = structure.engine[np.concatenate([savers, functions, functions])]
        # In order of the engine range, and in each of the row.
        self._size = len(calls) + 2
        self._place = np.sort(engine.astype(np.int64) * self._size + rows)

    def before(self, operators: Int64, engine: Int64) -> Int64:
        """How many lie between each operator and the one before it in its engine range.

        Args:
            operators: Rows, in order of the engine range, in it ascending.
            engine: The engine range that each ran in; -1 for the forward pass.
        """
        first = engine * self._size
        passed = self._place.searchsorted(first + operators, side="right")
        passed -= self._place.searchsorted(first)
        crossed: Int64 = passed.copy()
        on = np.flatnonzero(engine[1:] == engine[:-1])
        crossed[on + 1] -= passed[on]
        return crossed
