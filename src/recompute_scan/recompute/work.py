"""How long each call kept its device busy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recompute_scan.model import Calls, Kernels
from recompute_scan.recompute.structure import Structure
from recompute_scan.trace.columns import Int32, Int64


@dataclass(frozen=True)
class Work:
    """Per call: what it and all inside it cost.

    Attributes:
        time: ns; time of the kernels it launched where the trace has a GPU, else its own
            duration on the host.
        kernels: Number of kernels it launched.
        on_gpu: Whether ``time`` is kernel time.
        unlaunched: Kernels without a record of their launch: belonging to no call.
    """

    time: Int64
    kernels: Int32
    on_gpu: bool
    unlaunched: int


def measure(calls: Calls, structure: Structure, kernels: Kernels) -> Work:
    """The work of every call that is the top of its own (see ``Structure.top``)."""
    launched = kernels.launch >= 0
    unlaunched = int((~launched).sum())
    if not launched.any():
        # One zero, read as many.
        none = np.broadcast_to(np.int32(0), len(calls))
        return Work(calls.duration, none, False, unlaunched)
    count = np.zeros(len(calls), np.int32)
    time = np.zeros(len(calls), np.int64)
    top = structure.top[kernels.launch[launched]]
    known = top >= 0
    np.add.at(count, top[known], 1)
    np.add.at(time, top[known], (kernels.end - kernels.start)[launched][known])
    return Work(time, count, True, unlaunched)
