"""Where the trace shows checkpointed calls begin and end, in the forward pass and in replays."""

from __future__ import annotations

import numpy as np

from recompute_scan.model import Calls
from recompute_scan.recompute import vocabulary as words
from recompute_scan.recompute.structure import Role, Structure
from recompute_scan.trace.columns import Int64


class Boundaries:
    """Begins and ends of checkpoint functions, and what torch's other variant leaves of its begin.

    The non-reentrant checkpoint leaves an operator from torch 2.1 to 2.12; before and since it
    leaves nothing.
    """

    def __init__(self, calls: Calls, structure: Structure) -> None:
        saver = np.array([name == words.INPUT_SAVER for name in calls.names], np.bool_)
        operator = np.isin(structure.role, (Role.FORWARD, Role.CANDIDATE))
        savers = np.flatnonzero(saver[calls.name] & operator)
        functions = np.flatnonzero(structure.function == np.arange(len(calls)))
        rows = np.concatenate([savers, functions, functions + calls.size[functions] + 1])
        engine = structure.engine[np.concatenate([savers, functions, functions])]
        order = np.lexsort((rows, engine))
        self._rows, self._engine = rows[order], engine[order]

    def before(self, operators: Int64, engine: int = -1) -> Int64:
        """How many lie between each operator and the one before it.

        Args:
            operators: Rows, ascending.
            engine: The engine range that they ran in; -1 for the forward pass.
        """
        within = slice(*np.searchsorted(self._engine, (engine, engine + 1)))
        passed = np.searchsorted(self._rows[within], operators, side="right")
        return np.diff(passed, prepend=0)
