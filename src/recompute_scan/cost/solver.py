"""HiGHS, the solver of 0-1 programs: to the optimum, in one thread, and silent."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

from recompute_scan.terminal import without_lines

# From 1.16 on the first solver of a process prints these, before anyone can say that it is not to.
_BANNER = re.compile(rb"Running HiGHS |Includes third-party software components|Copyright \(c\)")


def silent_solver(time_limit_s: float) -> tuple[ModuleType, Any]:
    """The module, and a new ``Highs`` of it."""
    import highspy  # noqa: PLC0415 - takes longer than reading a small trace

    with without_lines(1, _BANNER):
        solver = highspy.Highs()
    solver.silent()
    for option, value in (
        ("mip_rel_gap", 0.0),
        ("mip_abs_gap", 0.0),
        ("time_limit", time_limit_s),
        ("threads", 1),
    ):
        solver.setOptionValue(option, value)
    return highspy, solver
