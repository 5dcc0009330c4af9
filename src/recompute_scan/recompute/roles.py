"""What a call can be: forward work, perhaps a recompute, a node's own formula, or none of these."""

from __future__ import annotations

from typing import Final

import numpy as np

from recompute_scan.trace.columns import Bool


class Role:
    """What a call is. Plain numbers: NumPy compares with an enumeration's five times as slowly."""

    INNER: Final = 0  # inside a call that has a role
    FORWARD: Final = 1  # outermost operator of forward work
    CANDIDATE: Final = 2  # outermost operator where a recompute can stand
    RANGE: Final = 3  # looked through: annotations, checkpoint functions
    BACKWARD: Final = 4  # the engine's range around one node
    FORMULA: Final = 5  # the node itself, or an operator of its own formula
    OPTIMIZER: Final = 6
    PLUMBING: Final = 7  # communication and resharding


def table(*roles: int) -> Bool:
    """For each role: is it one of these?"""
    found = np.zeros(Role.PLUMBING + 1, np.bool_)
    found[list(roles)] = True
    return found


# For each role: what is looked through, and the outermost operators of forward work.
LOOKED_THROUGH = table(Role.RANGE, Role.BACKWARD)
OPERATORS = table(Role.FORWARD, Role.CANDIDATE)
