"""How long a device computes, does other work, or does nothing, from its first kernel to its last.

The same quantities as Holistic Trace Analysis gives, counted apart from it, so that the two stand
side by side: a union of intervals of all that is recorded of the device.
"""

from __future__ import annotations

import numpy as np

from recompute_scan.cost.phases import covered
from recompute_scan.recompute import vocabulary as words
from recompute_scan.result import DeviceTime
from recompute_scan.trace.columns import Bool, Kind, Trace

_NS_PER_MS = 1e6


def device_time(trace: Trace) -> DeviceTime | None:
    """How the device spent the time that the trace covers; ``None`` without work on one."""
    work = np.isin(trace.kind, (Kind.KERNEL, Kind.COPY))
    start, end = trace.ts, trace.ts + trace.dur

    def length(these: Bool) -> float:
        return covered(start[these], end[these])

    if not work.any() or not (whole := float(end[work].max() - start[work].min())):
        return None
    named = np.array([bool(words.TALKS.match(name)) for name in trace.names], np.bool_)
    talking = (trace.kind == Kind.KERNEL) & named[trace.name]
    computing = (trace.kind == Kind.KERNEL) & ~talking
    busy, computed, talked = length(work), length(computing), length(talking)
    beside = computed + talked - length(computing | talking)
    return DeviceTime(
        kernel_time_ms=whole / _NS_PER_MS,
        idle_pct=100 * (1 - busy / whole),
        compute_pct=100 * computed / whole,
        non_compute_pct=100 * (busy - computed) / whole,
        overlap_pct=100 * beside / talked if talked else None,
    )
